"""Structured outputs: grammars compiled by llguidance, their state for each sequence, and token bitmasks for a step.

Reading order: compiled_grammar, grammar_setup, output_constraint, grammar_state, thinking, grammar_budget and
state_table, which run in the engine's process or in the process of grammar_server; compile_sandbox (trials within
limits); then the engine's side: local_grammars or grammar_process, grammar_backend (the choice between them),
grammar_cache, grammar_compiler and mask_filler. `execution` and `engine` may import this package.
"""
