"""The Triton backend: kernels for NVIDIA GPUs, which also run on a CPU in Triton's interpreter."""
