"""What a server imports, for the process that servers are forked from."""

from __future__ import annotations

import torch
import uvicorn

import quire.cli.main
import quire.cli.serve
import quire.engine.async_llm
import quire.engine.startup.loading
import quire.models.modules.decoder
import quire.server.app
import quire.text.tokenizers.tokenizer

__all__ = ["quire", "torch", "uvicorn"]
