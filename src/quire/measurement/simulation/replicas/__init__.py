"""A simulated replica: its engine's step, costs and requests."""
