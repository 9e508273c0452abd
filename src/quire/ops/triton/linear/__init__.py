"""Linear layers and experts by Triton kernels."""
