"""Modules: parts of a model that have tensors."""
