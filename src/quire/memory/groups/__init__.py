"""Cache groups, and prefix matching: the longest hit over all groups and tiers, partial blocks included.

Reading order: cache_group, match, partial_block, host_tier. `tables` and modules above it may import this package.
"""
