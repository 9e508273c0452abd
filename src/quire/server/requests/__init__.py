"""Request bodies, typed access to their fields, and errors."""
