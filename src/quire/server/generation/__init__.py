"""From a request's fields to a run on the engine, and from its output to response fields."""
