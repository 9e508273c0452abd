"""The slow twins: operations by their definitions, which backends are tested against."""
