"""Executors and model runners: they carry out plans."""
