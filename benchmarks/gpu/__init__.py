"""One command that measures the Triton backend on an NVIDIA GPU: `python -m benchmarks.gpu`."""
