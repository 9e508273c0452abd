"""Capacity: admission checks, the blocks that a preemption releases, and the size of the arena.

`tiers`, the manager, and, outside of `memory`, `capacity` and `engine` may import this package.
"""
