"""The engine: the doors of Python, and the loop behind all doors."""
