"""Measurements: workloads, their cost and their speed, in this process or on a server."""
