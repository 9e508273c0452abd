"""Routes of each protocol: OpenAI, Anthropic, Ollama, vLLM's own."""
