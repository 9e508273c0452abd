"""GGUF files: their headers, the types of their tensors, and what a model in one is in the terms of its family.

Reading order: tensor_types, header, reader, block_types, architectures, opening. The first three need no
torch. `models.checkpoint` opens files through `opening`; tools that inspect files may import `reader`.
"""
