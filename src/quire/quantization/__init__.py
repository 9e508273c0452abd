"""Checkpoints that are written quantised: rounding, calibration, and the files of compressed-tensors and GGUF.

Only `quire.cli` imports this package; nothing that serves a model does.
"""
