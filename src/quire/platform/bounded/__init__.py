"""Processing of untrusted input within limits of size, depth, time and memory."""
