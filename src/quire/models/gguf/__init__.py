"""GGUF files: headers, types of tensors, and the model of a file in the terms of its family.

Reading order: tensor_types, header, reader, block_types, architectures, opening. The first three need no torch.
`models.checkpoints.checkpoint` opens files through `opening`; tools that inspect files may import `reader`.
"""
