"""The remote block store in Redis or Valkey."""
