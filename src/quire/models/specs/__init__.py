"""Specifications of models as values, without tensors."""
