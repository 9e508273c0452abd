"""HTTP connections with limits, and streams of events."""
