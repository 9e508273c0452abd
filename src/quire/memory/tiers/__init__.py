"""Block transfers between tiers: swap to the host and back, blocks on disk, copies that a failed step lost.

The manager and the capacity queries may import this package.
"""
