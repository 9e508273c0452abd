"""The request fields of llama.cpp's server that OpenAI's protocol lacks: read, refused, or without effect here.

A field that would change an answer is never only logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.server.requests.fields import Fields, Refusal

# Fields with another name here.
ALIASES: Final[Mapping[str, str]] = {
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "reasoning_budget_tokens": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
    "return_tokens": "return_token_ids",
}
# Fields of `ALIASES` in which -1 sets no limit.
LIMITS: Final = frozenset({"n_predict", "reasoning_budget_tokens", "thinking_budget_tokens"})
NO_LIMIT: Final = -1
_OTHER_FILTERS: Final = "use min_p, top_n_sigma or typical_p"
_OWN_GRAMMARS: Final = "tools and thinking have grammars of their own"
_PARSERS: Final = "the server's --tool-call-parser and --reasoning-parser set how answers are read"
_BUDGET: Final = "the model's own marks are written where thinking_token_budget ends"
_IMAGES: Final = "send images as parts of messages to /v1/chat/completions"
UNSUPPORTED: Final[Mapping[str, Refusal]] = {
    "samplers": ((), "the order of samplers is fixed, and each has its own field"),
    "mirostat": ((0,), _OTHER_FILTERS),
    "tfs_z": ((1, 1.0), _OTHER_FILTERS),
    "xtc_probability": ((0, 0.0), _OTHER_FILTERS),
    "adaptive_target": ((-1, -1.0), _OTHER_FILTERS),
    "min_keep": ((0, 1), _OTHER_FILTERS),
    "dynatemp_range": ((0, 0.0), "use temperature"),
    "penalize_nl": ((False,), "use logit_bias"),
    "n_indent": ((0,), "use structured_outputs.regex"),
    "t_max_predict_ms": ((0, -1), "use max_tokens"),
    "n_probs": ((0,), "use logprobs, in chats with top_logprobs"),
    "post_sampling_probs": ((False,), "log probabilities are those of the model, before sampling"),
    "lora": (([],), "the field model names an adapter"),
    "grammar_lazy": ((False,), _OWN_GRAMMARS),
    "grammar_triggers": (([],), _OWN_GRAMMARS),
    "grammar_type": ((), _OWN_GRAMMARS),
    "preserved_tokens": (([],), "use skip_special_tokens"),
    "chat_format": ((), _PARSERS),
    "chat_parser": ((), _PARSERS),
    "parse_tool_calls": ((True,), _PARSERS),
    "reasoning_format": (("auto", "deepseek"), _PARSERS),
    "generation_prompt": ((), "the chat template has it"),
    "reasoning_budget_start_tag": (("",), _BUDGET),
    "reasoning_budget_end_tag": (("",), _BUDGET),
    "reasoning_budget_end_tags": (([],), _BUDGET),
    "reasoning_budget_message": (("",), _BUDGET),
    "response_fields": (([],), "answers have the fields of OpenAI's protocol"),
    "image_data": (([],), _IMAGES),
    "multimodal_data": (([],), _IMAGES),
    "system_prompt": (("",), "send it as a message"),
}
# Fields that change no answer here, with the reason.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("cache_prompt", "id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard"),
        "the cache belongs to all requests, and there are no slots",
    ),
    **dict.fromkeys(
        ("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
        "a setting of a method that is refused",
    ),
    **dict.fromkeys(
        (
            *(f"speculative.{name}" for name in ("n_max", "n_min", "p_min", "type")),
            *(f"speculative.ngram_{name}" for name in ("size_n", "size_m", "min_hits")),
        ),
        "drafts change no answer, and are the server's option",
    ),
    "backend_sampling": "where tokens are drawn changes none of them",
    "sse_ping_interval": "the server's --ping-interval sets it",
    "reasoning_control": "the end of thinking cannot be asked for while it goes on",
    **dict.fromkeys(
        ("timings_per_token", "return_progress", "verbose"), "/metrics and the usage have figures; the text is the same"
    ),
}
# Number of last tokens that penalties count. This server counts the whole context, for which the number is -1.
WINDOW: Final = "repeat_last_n"
WHOLE_CONTEXT: Final = -1
# Penalties, and the values at which they are off.
PENALTIES: Final[Mapping[str, float]] = {
    "repeat_penalty": 1,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}


def check_window(fields: Fields) -> None:
    """Refuse a window of the penalties that are on; without a penalty it has no effect."""
    window = fields.get(WINDOW)
    has_penalty = any(fields.get(name) not in (None, neutral) for name, neutral in PENALTIES.items())
    if has_penalty and window not in (None, WHOLE_CONTEXT):
        raise UnsupportedFeature(fields.name(WINDOW), f"penalties count the whole context, which is {WHOLE_CONTEXT}")


def translate(
    fields: Fields, no_limit: int, aliases: Mapping[str, str] = ALIASES
) -> tuple[Fields, Callable[[str], str]]:
    """Return a body with this server's names of fields, and a function from these to the client's."""
    check_window(fields)
    used_aliases = [name for name in aliases if fields.get(name) is not None]
    if not used_aliases:
        return fields, lambda name: name
    values: dict[str, Any] = fields.as_dict()
    names: dict[str, str] = {}
    for theirs in used_aliases:
        ours, value = aliases[theirs], values.pop(theirs)
        if values.get(ours) is not None:
            raise InvalidParameter(theirs, value, f"absent together with {names.get(ours, ours)}")
        is_unlimited = theirs in LIMITS and type(value) is int and value == NO_LIMIT
        values[ours], names[ours] = no_limit if is_unlimited else value, theirs
    return Fields(values), lambda name: names.get(name, name)
