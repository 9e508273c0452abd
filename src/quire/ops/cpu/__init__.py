"""Native CPU kernels, called through ctypes."""
