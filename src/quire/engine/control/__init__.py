"""Control loops that adapt to measured step durations: the prefill chunk size and the number of drafts.

The engine and `startup` may import this package.
"""
