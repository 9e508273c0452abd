"""The subscriber of an engine's KV events, for a router."""
