"""The defaults that a checkpoint states for its requests: sampling parameters, and tokens that end a sequence."""

from __future__ import annotations

import logging
from typing import Any

from quire.errors import InvalidParameter
from quire.models.checkpoint import Checkpoint
from quire.sequences.params import SamplingParams
from quire.text.gguf_tokenizer import end_token_ids
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Fields of generation_config.json -> sampling parameters of this engine.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a sequence: those of the configs, and the tokenizer's own end token."""
    ids = {*checkpoint.eos_token_ids, *end_token_ids(checkpoint.gguf_fields or {})}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def read_default_params(checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Return the generation config's sampling parameters; invalid values are left out with a warning.

    Args:
        checkpoint: checkpoint of the model.
        source: option `generation_config`: "auto", or "vllm" for no parameters.
    """
    generation = checkpoint.generation_config if source == "auto" else {}
    params: dict[str, Any] = {}
    for theirs, ours in GENERATION_FIELDS.items():
        value = generation.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except InvalidParameter as error:
            logger.warning("generation_config.json: %s; ignored", error)
        else:
            params[ours] = value
    if generation.get("do_sample") is False:
        params["temperature"] = 0.0
    return params
