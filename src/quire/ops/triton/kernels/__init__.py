"""The kernels: programs that Triton compiles, and what they share."""
