"""Structured outputs: grammars compiled by llguidance, their state for each sequence, and token bitmasks for a step.

Reading order: grammar_cache (compiled grammars), grammar_compiler and compile_sandbox (compilation within limits),
grammar_state, mask_filler, grammar_budget. `execution` and `engine` may import this package.
"""
