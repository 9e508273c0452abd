"""Recordings of the commands of a memory manager, and their replay.

Nothing in `memory` imports this package; `engine` and `cli` do.
"""
