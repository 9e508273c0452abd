"""Counters of an engine and of each step, and the lifetimes of blocks.

The engine and everything above it may import this package.
"""
