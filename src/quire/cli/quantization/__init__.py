"""Quantisation of checkpoints: rounding, calibration, and output as compressed-tensors folders or GGUF files.

Only `quire.cli` imports this package; no code that serves a model does.
"""
