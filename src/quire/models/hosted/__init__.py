"""Decoders that transformers builds, run over Quire's paged memory."""
