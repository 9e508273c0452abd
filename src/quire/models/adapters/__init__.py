"""Low-rank adapters: their files, the layers that they are for, and the slots of those that are loaded."""
