"""Conversion of a request's fields to `SamplingParams`, which validates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Final

from quire.config import ResolvedConfig
from quire.errors import InvalidParameter
from quire.sequences.params import NO_CHOICE, SamplingParams
from quire.server.generation import llama_cpp_fields, structured_fields
from quire.server.requests.fields import Fields, Refusal

# Parameters that a route computes itself, or that clients do not set.
_OTHER_PARAMETERS: Final = ("max_tokens", "logprobs", "detokenize", "kept_special_ids")
# Fields that both routes pass to `SamplingParams` unchecked: a new parameter is one of them.
SAMPLING_FIELDS: Final = tuple(
    item.name
    for item in fields_of(SamplingParams)
    if item.init and item.metadata.get("has_flag", True) and item.name not in _OTHER_PARAMETERS
)
_LABEL: Final = "a label for the client's own records"
_CACHED: Final = "all prefixes are cached; cache_salt keeps them apart"
# Labels and hints that change no answer, with the reason.
LABELS: Final[Mapping[str, str]] = {
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "metadata": _LABEL,
    "prompt_cache_key": _CACHED,
    "prompt_cache_retention": _CACHED,
    "prompt_cache_options": _CACHED,
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "verbosity": "no model here was trained on it; the prompt can ask for short answers",
    "prediction": "a hint for speed; drafts are the server's option",
}
_TEXT_LABELS: Final = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity"),
)
OPTION_FIELDS = (
    "model",
    "max_tokens",
    "logprobs",
    "stream",
    "stream_options",
    "stream_options.include_usage",
    "stream_options.continuous_usage_stats",
    "use_beam_search",
    "add_special_tokens",
    "priority",
    "cache_salt",
    "retain_cache",
    "kv_transfer_params",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
UNSUPPORTED: Mapping[str, Refusal] = {
    **structured_fields.UNSUPPORTED,
    "logits_processors": (([],), "no code is taken from requests"),
    "truncate_prompt_tokens": ((), "send the prompt that you mean"),
    "spaces_between_special_tokens": ((True,), "special tokens are written as they are"),
    "prompt_embeds": ((), "a prompt is text or token ids"),
    "media": ((), "a prompt is text or token ids"),
    "vllm_xargs": (({},), "it names another engine's internals"),
    "moderation": ((), "the server judges no texts"),
    "tenant": ((), "a header of the operator's gateway names the tenant; cache_salt is the client's own"),
}
NEUTRAL: Final[Mapping[str, str]] = {
    **LABELS,
    **llama_cpp_fields.WITHOUT_EFFECT,
    "stream_options.include_obfuscation": "streams have no padding",
}
# Fields that no route may ignore, since a client that sends them relies on their effect.
NEVER_IGNORED: Mapping[str, Refusal] = {name: UNSUPPORTED[name] for name in ("tenant", "media")}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of both routes other than sampling parameters.

    Args:
        stream: True if the answer is a stream.
        include_usage: True if a stream ends with a chunk of token counts.
        continuous_usage: True if every chunk has the token counts so far.
        priority: priority under the "priority" policy; lower runs first.
        cache_salt: salt of the prefix blocks; only requests with the same salt share them.
        retain_cache: True if the request's cached blocks are evicted last.
        return_token_ids: True if the answer has token ids.
        name_tokens_by_id: True if log probabilities name tokens "token_id:N".
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    retain_cache: bool
    return_token_ids: bool
    name_tokens_by_id: bool


def read_options(fields: Fields, config: ResolvedConfig) -> Options:
    """Read the options of both routes other than sampling parameters."""
    for label in _TEXT_LABELS:
        fields.text(label)
    fields.object("metadata")
    fields.flag("store")
    fields.object("prediction")
    priority = 0 if fields.get("priority") is None else fields.get("priority")
    config.check_priority(priority)
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
    fields: Fields, defaults: Mapping[str, Any], overrides: Mapping[str, Any], field_aliases: Mapping[str, str]
) -> SamplingParams:
    """Build the sampling parameters of a request."""
    requested = {name: value for name in SAMPLING_FIELDS if (value := fields.get(name)) is not None}
    if "beam_width" in field_aliases:
        requested["beam_width"] = requested.pop("best_of", requested.get("n", 1))
    values: dict[str, Any] = {**defaults, **(NO_CHOICE if "beam_width" in requested else {}), **requested}
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {_token_id(key): bias for key, bias in values["logit_bias"].items()}
    values.update(overrides)
    if (hand_over := fields.get("kv_transfer_params")) is not None:
        values["extra_args"] = {"kv_transfer_params": hand_over}
    try:
        params = SamplingParams(**values)
    except InvalidParameter as error:
        raise InvalidParameter(
            field_aliases.get(error.field or "", error.field or ""), error.value, error.allowed
        ) from error
    if params.beam_width is not None and fields.flag("stream"):
        raise InvalidParameter("stream", True, "false with beam search: the best outputs are known at the end")
    if params.kv_transfer is not None and params.kv_transfer.do_remote_decode and fields.flag("stream"):
        raise InvalidParameter("stream", True, "false where kv_transfer_params has do_remote_decode")
    if params.is_ranked and fields.flag("stream"):
        raise InvalidParameter("best_of", params.best_of, f"n ({params.n}) when stream is true: the best come last")
    return params


def beam_width_alias(fields: Fields) -> dict[str, str]:
    """Return the alias of the beam width: with vLLM's `use_beam_search` it is `best_of`, or else `n`."""
    has_width = fields.get("beam_width") is not None
    is_wanted = fields.flag("use_beam_search", has_width)
    if not is_wanted and has_width:
        raise InvalidParameter("use_beam_search", False, "true or absent together with beam_width")
    if not is_wanted or has_width:
        return {}
    return {"beam_width": "n" if fields.get("best_of") is None else "best_of"}


def _token_id(key: object) -> object:
    """Return a JSON key as an integer; the validator refuses a key that is none."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
