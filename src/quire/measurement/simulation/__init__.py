"""Simulation: the real scheduler and the real memory over a data plane that is only a model."""
