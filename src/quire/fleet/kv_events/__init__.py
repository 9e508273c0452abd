"""KV events on the wire: vLLM's messages over ZMQ, published by an engine and followed by a router."""
