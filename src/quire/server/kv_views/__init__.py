"""Views of the KV cache for operators and the page."""
