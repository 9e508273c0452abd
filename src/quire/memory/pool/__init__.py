"""The blocks of one cache group (`BlockPool`), and the arena of slabs that several groups share.

Reading order: pool, idle_queue, idle_blocks, eviction, retention; for hybrid models slab_layout, arena, group_slabs.
`groups`, `tables`, `tiers` and the modules above may import this package; it imports `prefix`.
"""
