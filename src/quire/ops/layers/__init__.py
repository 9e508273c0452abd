"""Linear layers made of others: gated, joined, reordered."""
