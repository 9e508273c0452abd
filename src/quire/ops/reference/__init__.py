"""The slow twins: operations as defined, which backends are tested against."""
