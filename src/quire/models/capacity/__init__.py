"""Capacity planning: the numbers of tokens and sequences that fit into memory, computed without weights or tensors.

The engine's loader and `quire plan` size the KV cache with the same functions. `engine`, `server` and `cli` may import
this package; it imports `config`, `memory` and `models`, and never loads torch.
"""
