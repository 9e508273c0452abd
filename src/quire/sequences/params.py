"""Sampling parameters and the one validator behind every door (Python, HTTP, command line)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import InvalidParameter

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and defaults as vLLM users know them.

    Every instance that exists is valid: construction runs the validator. What depends on the model (vocabulary,
    context length, `max_num_seqs`) is checked by `check_for_model` at the engine's door.

    Args:
        n: sequences to sample from one prompt; the prompt is computed once and forked.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        repetition_penalty: divide (multiply, when negative) logits of tokens seen in prompt or output; 1 is off.
        presence_penalty: subtract once from logits of tokens seen in the output; 0 is off.
        frequency_penalty: subtract per occurrence in the output; 0 is off.
        logit_bias: token id -> value added to its logit.
        allowed_token_ids: if given, only these tokens can be sampled.
        seed: makes the request's tokens a function of its own prompt and parameters alone.
        stop: strings that end the output; not included in it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output; the id is kept in `token_ids`, its text only with
            `include_stop_str_in_output`.
        ignore_eos: generate past the model's end-of-sequence tokens.
        max_tokens: new tokens at most; None means up to the context length.
        min_tokens: new tokens at least before an end-of-sequence or stop token may be sampled.
        logprobs: log probabilities of this many likeliest tokens per position, and of the chosen one.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidParameter: naming the field, the value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    needs_history: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", _integer("n", self.n, 1, MAX_N))
        put(self, "temperature", _number("temperature", self.temperature, 0.0, 100.0))
        top_k = _integer("top_k", self.top_k, -1, 2**31 - 1)
        put(self, "top_k", max(top_k, 0))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put(
            self,
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True),
        )
        put(self, "presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(self, "frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, limit=None)
            if not allowed:
                raise InvalidParameter("allowed_token_ids", (), "at least one token id, or None")
            put(self, "allowed_token_ids", allowed)
        if self.seed is not None:
            put(self, "seed", _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED))
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, limit=MAX_STOPS))
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, getattr(self, name), "true or false")
        if self.max_tokens is not None:
            put(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        put(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop", self.stop, "empty when detokenize is false (stop strings need text)")
        put(
            self,
            "needs_history",
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0,
        )

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always chosen."""
        return self.temperature == 0.0

    def check_for_model(self, *, vocab_size: int, max_num_seqs: int) -> None:
        """Check what only the engine knows.

        Args:
            vocab_size: token ids must lie in [0, vocab_size).
            max_num_seqs: sequences that can run at once; `n` must fit.

        Raises:
            InvalidParameter: naming the field.
        """
        if self.n > max_num_seqs:
            raise InvalidParameter("n", self.n, f"at most max_num_seqs ({max_num_seqs})")
        for name, ids in (
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidParameter(name, token_id, f"token ids below the vocabulary size ({vocab_size})")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise InvalidParameter(name, count, f"at most the vocabulary size ({vocab_size})")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, value, f"an integer from {low} to {high}")
    return value


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    allowed = f"a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, value, allowed)
    # Compared before it becomes a float: a whole number may be too large for one; NaN compares as False.
    if not low <= value <= high or (open_low and value == low):
        raise InvalidParameter(name, value, allowed)
    return float(value)


def _token_ids(name: str, value: object, limit: int | None) -> tuple[int, ...]:
    allowed = "a list of token ids (integers from 0)" + (f", at most {limit}" if limit is not None else "")
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidParameter(name, value, allowed)
    if limit is not None and len(value) > limit:
        raise InvalidParameter(name, f"{len(value)} ids", allowed)
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidParameter(name, token_id, allowed)
    return tuple(value) if isinstance(value, list | tuple) else tuple(sorted(value))


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = f"a string or up to {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters"
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOPS:
        raise InvalidParameter("stop", value, allowed)
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARS:
            raise InvalidParameter("stop", string, allowed)
    return tuple(strings)


def _logit_bias(value: object) -> Mapping[int, float] | None:
    allowed = f"a map of at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100"
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        raise InvalidParameter("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for token_id, amount in value.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidParameter("logit_bias", token_id, allowed)
        bias[token_id] = _number("logit_bias", amount, -100.0, 100.0)
    return bias or None
