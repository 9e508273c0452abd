"""Tokenizers of checkpoints, and detokenization."""
