"""Simulation: the real scheduler and memory manager over a simulated data plane."""
