"""Checkpoints: configuration and tensors of a folder or a GGUF file."""
