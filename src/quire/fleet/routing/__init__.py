"""Routing of requests to replicas by the contents of their caches and by their load. No I/O, no clock."""
