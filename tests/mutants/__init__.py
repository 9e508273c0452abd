"""Mutants: honest code with one bug each, and the checkers that must fail on them."""
