"""Views of a running engine for operators: Prometheus metrics and the `/kv` report.

`llm` and `async_llm` may import this package.
"""
