"""Checkpoints of a model without its output head, as for embedding models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.models.tensors.stored_tensor import StoredTensor

# Field that is added to the configuration of a checkpoint without a head.
HEADLESS: Final = "quire_headless"
HEAD = "lm_head."
# Architectures whose name with a head has another form.
CAUSAL_NAMES: Final = {"GPT2Model": "GPT2LMHeadModel"}
# Name of the embedding in a model that was saved without its head -> prefix of the names with a head, and whether the
# head is tied if a configuration does not say so.
UNPREFIXED: Final = {"embed_tokens.weight": ("model.", False), "wte.weight": ("transformer.", True)}


def causal_name(name: str) -> str:
    """Return the name with a head of an architecture without: `Qwen3ForCausalLM` for `Qwen3Model`; others unchanged."""
    if name in CAUSAL_NAMES.values() or not name.endswith("Model"):
        return name
    return CAUSAL_NAMES.get(name, name.removesuffix("Model").removesuffix("Text") + "ForCausalLM")


def with_head(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Return a checkpoint with the names that it would have with a head.

    The tensors of a model that was saved without its head have no prefix, "model." for most. If the head is not tied
    and not stored, the embedding replaces it, and the configuration gets the field `HEADLESS`.
    """
    embedding = next((name for name in UNPREFIXED if name in tensors), None)
    if embedding is None:
        return config, tensors
    prefix, is_tied = UNPREFIXED[embedding]
    named = {name if name.startswith(HEAD) else prefix + name: stored for name, stored in tensors.items()}
    has_head = config.get("tie_word_embeddings", is_tied) is True or any(name.startswith(HEAD) for name in named)
    return config if has_head else {**config, "tie_word_embeddings": True, HEADLESS: True}, named
