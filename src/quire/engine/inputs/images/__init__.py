"""Images of prompts: where they come from, their pixels, and the patches that a vision encoder reads."""
