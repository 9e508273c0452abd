"""From a configuration to a running engine: checkpoint, weights, pools, disk tier, drafter.

`llm` and `async_llm` may import this package; nothing else in `engine` does.
"""
