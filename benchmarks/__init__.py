"""Benchmarks: each file measures one thing and writes `benchmarks/results/<name>.json`."""
