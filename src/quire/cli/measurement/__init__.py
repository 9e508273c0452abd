"""Commands that measure and simulate."""
