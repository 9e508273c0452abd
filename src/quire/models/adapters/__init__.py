"""Low-rank adapters: their files, their target layers, and the slots of loaded adapters."""
