"""Cache groups and what is found in them: the longest prefix hit over all groups and tiers, partial blocks included.

Reading order: cache_group, match, partial_block, tiered_view, host_tier. `tables` and what is above may import this.
"""
