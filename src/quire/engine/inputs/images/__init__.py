"""Images of prompts: their sources, their pixels, and the patches that a vision encoder reads."""
