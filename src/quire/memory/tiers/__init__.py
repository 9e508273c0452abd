"""Movements between the tiers: swap to the host and back, blocks on disk, copies that a failed step has lost.

The manager and the capacity queries may import this package.
"""
