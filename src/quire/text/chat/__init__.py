"""Chat templates, and prompts of conversations."""
