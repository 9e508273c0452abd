"""A simulated replica: its steps, their times, and its requests."""
