"""Ranks: processes that share one model, how they start, exchange numbers, and end together."""
