"""Measuring: workloads, what they cost and how fast they go, in this process or on a server."""
