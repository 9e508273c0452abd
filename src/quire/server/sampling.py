"""From a request's fields to `SamplingParams`, the one validator behind every door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter
from quire.sequences.params import NO_CHOICE, SamplingParams
from quire.server import structured
from quire.server.fields import Fields, Refusal

# Fields that mean to both routes what they mean to `SamplingParams`, which alone checks them.
SAMPLING_FIELDS = (
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "speculative",
)
# Labels for the client's own books: nothing to honour.
LABEL_FIELDS = ("user", "safety_identifier", "prompt_cache_key")
OPTION_FIELDS = (
    "model",
    "max_tokens",
    "logprobs",
    "stream",
    "stream_options",
    "use_beam_search",
    "add_special_tokens",
    "priority",
    "cache_salt",
    "retain_cache",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
UNSUPPORTED: Mapping[str, Refusal] = {
    **structured.UNSUPPORTED,
    "logits_processors": (([],), "no code is taken from requests"),
    "truncate_prompt_tokens": ((), "send the prompt that you mean"),
    "spaces_between_special_tokens": ((True,), "special tokens are written as they are"),
    "prompt_embeds": ((), "a prompt is text or token ids"),
    "media": ((), "a prompt is text or token ids"),
    "kv_transfer_params": ((), "the KV cache stays on this server"),
    "vllm_xargs": (({},), "it names another engine's internals"),
    "tenant": ((), "the operator says in a header whose a request is; cache_salt is the client's own"),
    "service_tier": (("auto", "default"), "there is one tier"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What both routes understand beside sampling.

    Args:
        stream: send the answer as it comes.
        include_usage: end a stream with a chunk of token counts.
        continuous_usage: put the counts so far in every chunk.
        priority: lower runs first, under the "priority" policy.
        cache_salt: requests share prefix blocks only with requests of the same salt.
        retain_cache: have the blocks that are left in the prefix cache evicted last.
        return_token_ids: add token ids to the answer.
        name_tokens_by_id: write tokens of log probabilities as "token_id:N".
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    retain_cache: bool
    return_token_ids: bool
    name_tokens_by_id: bool


def read_options(fields: Fields, scheduling_policy: str) -> Options:
    """Read what both routes understand beside sampling.

    Args:
        fields: the body.
        scheduling_policy: the engine's; a priority means nothing under "fcfs".

    Raises:
        InvalidParameter: naming the field.
    """
    for label in LABEL_FIELDS:
        fields.text(label)
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    include_usage = continuous_usage = False
    if stream_options is not None:
        if not stream:
            raise InvalidParameter("stream_options", fields.get("stream_options"), "absent unless stream is true")
        include_usage = stream_options.flag("include_usage")
        continuous_usage = stream_options.flag("continuous_usage_stats")
        if continuous_usage and not include_usage:
            raise InvalidParameter("stream_options.continuous_usage_stats", True, "false unless include_usage is true")
    if stream and fields.get("prompt_logprobs") is not None:
        raise InvalidParameter("prompt_logprobs", fields.get("prompt_logprobs"), "absent when stream is true")
    priority = fields.integer("priority", -(2**31), 2**31 - 1) or 0
    if priority and scheduling_policy != "priority":
        raise InvalidParameter("priority", priority, f"0 under the scheduling policy {scheduling_policy!r}")
    return Options(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        priority=priority,
        cache_salt=fields.text("cache_salt"),
        retain_cache=fields.flag("retain_cache"),
        return_token_ids=fields.flag("return_token_ids"),
        name_tokens_by_id=fields.flag("return_tokens_as_token_ids"),
    )


def read_sampling(
    fields: Fields, defaults: Mapping[str, Any], own: Mapping[str, Any], field_aliases: Mapping[str, str]
) -> SamplingParams:
    """Build the sampling parameters of a request.

    Args:
        fields: the body.
        defaults: the model's recommendations, for what the body leaves open.
        own: parameters that the route computed itself; they win.
        spelled: how the client wrote a parameter, where that is not `SamplingParams`' name; a beam width that has
            another name is taken from there.

    Raises:
        InvalidParameter: in the client's spelling.
    """
    asked = {name: value for name in SAMPLING_FIELDS if (value := fields.get(name)) is not None}
    if "beam_width" in field_aliases:
        asked["beam_width"] = asked.pop("best_of", asked.get("n", 1))
    given: dict[str, Any] = {**defaults, **(NO_CHOICE if "beam_width" in asked else {}), **asked}
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = {_token_id(key): bias for key, bias in given["logit_bias"].items()}
    given.update(own)
    try:
        params = SamplingParams(**given)
    except InvalidParameter as error:
        raise InvalidParameter(
            field_aliases.get(error.field or "", error.field or ""), error.value, error.allowed
        ) from error
    if params.beam_width is not None and fields.flag("stream"):
        raise InvalidParameter("stream", True, "false beside a beam search: the best outputs are known last")
    if params.is_ranked and fields.flag("stream"):
        raise InvalidParameter("best_of", params.best_of, f"n ({params.n}) when stream is true: the best come last")
    return params


def width_spelling(fields: Fields) -> dict[str, str]:
    """Return how the client wrote a beam width: by vLLM's `use_beam_search` it is `best_of`, or else `n`.

    Returns:
        The client's field by its name here; nothing where they are the same, or where no width is wanted.

    Raises:
        InvalidParameter: a width, and that no beam search is wanted.
    """
    has_width = fields.get("beam_width") is not None
    is_wanted = fields.flag("use_beam_search", has_width)
    if not is_wanted and has_width:
        raise InvalidParameter("use_beam_search", False, "true or absent beside beam_width")
    if not is_wanted or has_width:
        return {}
    return {"beam_width": "n" if fields.get("best_of") is None else "best_of"}


def _token_id(key: object) -> object:
    """Return the integer that a JSON key spells; anything else stays, for the validator to refuse."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
