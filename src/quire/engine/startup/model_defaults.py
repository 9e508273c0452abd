"""The sampling parameters that a checkpoint recommends: its defaults for requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from quire.errors import InvalidParameter, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.gguf.architectures.metadata import shortest
from quire.sequences.params import SamplingParams

logger = logging.getLogger(__name__)

# Fields of generation_config.json -> sampling parameters of this engine.
GENERATION_FIELDS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# The same for the metadata of a GGUF file.
GGUF_PREFIX: Final = "general.sampling."
GGUF_FIELDS: Final[Mapping[str, str]] = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Other fields that change answers, and the values at which they do not. Their settings (xtc_threshold, mirostat_tau,
# mirostat_eta) have no meaning without them.
GGUF_UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    f"{GGUF_PREFIX}sequence": (),
    f"{GGUF_PREFIX}xtc_probability": (0,),
    f"{GGUF_PREFIX}mirostat": (0,),
    "tokenizer.ggml.suppress_tokens": ([],),
}
# Number of last tokens that `penalty_repeat` counts. This engine counts the whole context, for which the number is -1.
GGUF_WINDOW: Final = f"{GGUF_PREFIX}penalty_last_n"
WHOLE_CONTEXT: Final = -1


def read_default_params(checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Return the sampling parameters that a model recommends; invalid values are left out with a warning.

    They come from a folder's generation_config.json, or from the metadata of a GGUF file: a generation_config.json in
    the file's folder is not read.
    """
    if source != "auto":
        return {}
    if checkpoint.gguf_fields is not None:
        return _of_gguf(f"{checkpoint.gguf_path}", checkpoint.gguf_fields)
    generation = checkpoint.generation_config
    given = {ours: generation.get(theirs) for theirs, ours in GENERATION_FIELDS.items()}
    params = dict(_valid("generation_config.json", given))
    if generation.get("do_sample") is False:
        params["temperature"] = 0.0
    return params


def sampling_fields(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the sampling parameters that a folder recommends as the metadata of a GGUF file."""
    params = read_default_params(checkpoint, "auto")
    return {
        f"{GGUF_PREFIX}{name}": max(params[ours], 0) if ours == "top_k" else float(params[ours])
        for name, ours in GGUF_FIELDS.items()
        if ours in params
    }


def _of_gguf(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a GGUF file; warn of parameters that the engine does not support."""
    given = {ours: _number(fields.get(GGUF_PREFIX + theirs)) for theirs, ours in GGUF_FIELDS.items()}
    params = dict(_valid(path, given))
    unserved = dict(GGUF_UNSERVED)
    if params.get("repetition_penalty", 1) != 1:
        unserved[GGUF_WINDOW] = (WHOLE_CONTEXT,)
    for name, neutral in unserved.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            logger.warning("%s: %s is %s, which is not served; ignored", path, name, shown(value))
    return params


def _number(value: object) -> object:
    """Return the decimal number that a float32 of the metadata was written from; see `shortest`."""
    return shortest(value) if isinstance(value, float) else value


def _valid(origin: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that have a value, and a valid one."""
    for name, value in given.items():
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidParameter as error:
            logger.warning("%s: %s; ignored", origin, error)
        else:
            yield name, value
