"""The inputs of a step: tensors, block tables, KV memory, copies of blocks."""
