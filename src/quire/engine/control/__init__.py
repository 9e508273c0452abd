"""Control loops that adapt to measured step durations: the prefill chunk size and the number of draft tokens.

The engine and `startup` may import this package.
"""
