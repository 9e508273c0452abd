"""Models as values: nothing here holds a tensor."""
