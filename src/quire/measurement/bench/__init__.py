"""Measurements of workloads, in this process or on a server: speed, cost and quality."""
