"""Loading of a checkpoint into a model that runs."""
