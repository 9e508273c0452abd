"""Linear layers that wrap other linear layers: gated, joined, reordered."""
