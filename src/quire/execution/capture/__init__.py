"""Captured steps: kernel launches recorded once and replayed."""
