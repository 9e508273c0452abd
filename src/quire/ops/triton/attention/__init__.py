"""Paged attention by Triton kernels, and the work items of its launches."""
