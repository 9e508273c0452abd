"""Checkpoints of a model without its output head, as for embedding models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.models.tensors.stored_tensor import StoredTensor

# Field that is added to the configuration of a checkpoint without a head.
HEADLESS: Final = "quire_headless"
HEAD = "lm_head."


def causal_name(name: str) -> str:
    """Return the name with a head of an architecture without: `Qwen3ForCausalLM` for `Qwen3Model`; others unchanged."""
    return name.removesuffix("Model").removesuffix("Text") + "ForCausalLM" if name.endswith("Model") else name


def with_head(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Return a checkpoint with the names that it would have with a head.

    The tensors of a model that was saved without its head have no prefix "model.". If the head is not tied and not
    stored, the embedding replaces it, and the configuration gets the field `HEADLESS`.
    """
    if "embed_tokens.weight" not in tensors:
        return config, tensors
    named = {name if name.startswith(HEAD) else f"model.{name}": stored for name, stored in tensors.items()}
    has_head = config.get("tie_word_embeddings") is True or any(name.startswith(HEAD) for name in named)
    return config if has_head else {**config, "tie_word_embeddings": True, HEADLESS: True}, named
