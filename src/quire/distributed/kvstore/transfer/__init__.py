"""Transfer of blocks between engines."""
