"""The engine: the Python interfaces `LLM` and `AsyncLLM`, and the step loop of both."""
