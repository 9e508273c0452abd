"""Sampled tokens on the device that the host has not read."""
