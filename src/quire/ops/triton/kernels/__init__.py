"""Triton kernels, and their common functions."""
