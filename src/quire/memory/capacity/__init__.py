"""Whether something fits: checks of an admission, blocks that a preemption releases, sizing of the arena.

`tiers`, the manager, and outside of memory `capacity` and `engine` may import this package.
"""
