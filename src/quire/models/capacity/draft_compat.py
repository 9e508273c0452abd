"""Checks from configurations whether a draft model, or the target's own MTP head, can make drafts."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig, context_length
from quire.errors import ConfigError
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import ModelSpec


def mtp_spec(model: str, target: ModelSpec | HostedSpec, *, is_stored: bool = True) -> ModelSpec:
    """Return the specification of the MTP head of a target.

    Args:
        model: name of the target, for messages.
        target: the target model.
        is_stored: False if the checkpoint lacks the tensors of the head.

    Raises:
        ConfigError: the target has no head, or one with several layers or its own embedding.
    """
    if isinstance(target, HostedSpec) or target.mtp is None or not is_stored:
        raise ConfigError(
            "speculative_method 'mtp' needs a model with a head for multi-token prediction, of one layer and with the "
            f"embedding of the model (tensors mtp.* of Qwen3.5, nextn.* in GGUF files), and {model} has none: set it "
            "to 'ngram', 'suffix', 'draft' or 'off'",
            field="speculative_method",
        )
    return replace(target, layers=(target.mtp,), mtp=None, tied_head=True, is_mtp=True)


def check_draft(config: EngineConfig, target: ModelSpec | HostedSpec, draft: ModelSpec | HostedSpec) -> None:
    """Refuse a draft model with another vocabulary size, or for contexts that are too short.

    Args:
        config: engine options, with a draft model.
        target: the target model.
        draft: the draft model.

    Raises:
        ConfigError: the models do not match; the message has both numbers.
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
