"""Whether a draft model can guess for a target, as far as their configurations tell."""

from __future__ import annotations

from typing import NamedTuple

from quire.config import EngineConfig, context_length
from quire.errors import ConfigError


class ModelLimits(NamedTuple):
    """What of a model's configuration a draft model and its target must agree on.

    Args:
        vocab_size: None where a configuration that no family reads does not say it.
        max_position: tokens of the longest context that the model was made for.
    """

    vocab_size: int | None
    max_position: int


def check_draft(config: EngineConfig, target: ModelLimits, draft: ModelLimits) -> None:
    """Refuse a draft model that has another vocabulary, or was made for contexts that are too short.

    Args:
        config: of the engine, with a draft model.
        target: what the target's configuration says.
        draft: what the draft model's says.

    Raises:
        ConfigError: with both numbers.
    """
    name = config.speculative.draft_model
    sizes = (target.vocab_size, draft.vocab_size)
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"draft_model {name} has a vocabulary of {draft.vocab_size} tokens, and {config.model.model} one of "
            f"{target.vocab_size}: a draft model needs the same",
            field="draft_model",
        )
    longest = context_length(config.model.max_model_len, target.max_position)
    if draft.max_position < longest:
        raise ConfigError(
            f"draft_model {name} was made for contexts of {draft.max_position} tokens, and max_model_len is {longest}: "
            f"set max_model_len to at most {draft.max_position}",
            field="draft_model",
        )
