"""Recordings of the commands that a memory manager was given, and their replay.

Nothing in `memory` imports this package; `engine` and `cli` do.
"""
