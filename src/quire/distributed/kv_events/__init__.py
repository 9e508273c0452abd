"""KV events on the wire, in vLLM's format."""
