"""Construction of a running engine from a configuration: checkpoint, weights, pools, disk tier, drafter.

`llm` and `async_llm` may import this package; nothing else in `engine` does.
"""
