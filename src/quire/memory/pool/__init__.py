"""The blocks of one cache group (`BlockPool`), and the arena of slabs that several groups share.

Reading order: pool, idle_queue, idle_blocks, eviction, retention. That is all for models with one group. For several
groups: slab_layout, slab_supply, single_block_slabs (groups of equal blocks), multi_block_slabs, arena.
`groups`, `tables`, `tiers` and the modules above may import this package; it imports `prefix`.
"""
