"""Whether a draft model can make drafts for a target, as far as their configurations tell."""

from __future__ import annotations

from quire.config import EngineConfig, context_length
from quire.errors import ConfigError
from quire.models.spec import ModelSpec


def check_draft(config: EngineConfig, target: ModelSpec, draft: ModelSpec) -> None:
    """Refuse a draft model that has another vocabulary size, or was made for contexts that are too short.

    Args:
        config: engine options, with a draft model.
        target: the target model.
        draft: the draft model.

    Raises:
        ConfigError: with both numbers.
    """
    name = config.speculative.draft_model
    if draft.vocab_size != target.vocab_size:
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
