"""Front processes: they speak HTTP, and the engine's process computes; messages of bytes go between them.

A front imports neither torch nor the engine.
"""
