"""Benchmarks and the simulator."""
