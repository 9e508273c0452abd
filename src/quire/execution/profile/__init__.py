"""GPU memory of steps, measured by running and capturing the largest ones."""
