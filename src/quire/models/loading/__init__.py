"""From a checkpoint to a model that runs."""
