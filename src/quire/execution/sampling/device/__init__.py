"""Sampling on the device of the logits."""
