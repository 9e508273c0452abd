"""Sampling parameters and the one validator behind every door (Python, HTTP, command line)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final

from quire.config.hints import SAMPLING_HINTS, hint_for
from quire.errors import InvalidParameter, UnknownParameter, shown
from quire.sequences.param_checks import (
    integer,
    logit_bias,
    number,
    processors,
    speculative,
    strategy,
    strings,
    token_ids,
)
from quire.sequences.strategy import Strategy
from quire.sequences.structured import StructuredOutputs, structured_outputs

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOP_IDS = 64
# More than any vocabulary has; `check_for_model` knows how many there are.
MAX_ALLOWED_IDS = 2**20
MAX_BAD_WORDS = 1024
MAX_SEED = 2**63 - 1
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0
# Parameters that shape a random choice, and their neutral values. A model may recommend other values for samples.
CHOICE_FIELDS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0}
NO_CHOICE = {"temperature": 1.0, **CHOICE_FIELDS}
# Logits are divided by it, and must stay finite in float32; as far below 1 as the largest one is above.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


class RequestOutputKind(Enum):
    """What each output of a stream holds, by vLLM's names."""

    CUMULATIVE = 0  # the whole output so far
    DELTA = 1  # what is new since the output before it
    FINAL_ONLY = 2  # the whole output, once, when the request has finished


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and defaults as vLLM users know them.

    Every instance that exists is valid: construction runs the validator. What depends on the model (vocabulary,
    context length, `max_num_seqs`) is checked by `check_for_model` at the engine's door.

    Args:
        n: sequences to sample from one prompt; the prompt is computed once and forked.
        best_of: sample so many sequences, and return the `n` whose tokens have the highest mean log probability, best
            first; None samples `n`.
        beam_width: search with so many beams, and return the `n` best outputs, best first; nothing is drawn then. None
            samples.
        length_penalty: of a beam search: scores are divided by the output's length to this power.
        early_stopping: of a beam search: True ends it as soon as `beam_width` outputs have ended; False when none of
            the beams, ending now, would be better than those; "never" when none could become better.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        typical_p: keep the tokens whose surprise is closest to the expected one, until their probability reaches this;
            1 keeps all.
        top_n_sigma: drop tokens whose logit is so many standard deviations below the greatest; 0 or
            -1 drops none.
        repetition_penalty: divide (multiply, when negative) logits of tokens seen in prompt or output, from 0.01 to
            100; 1 is off.
        presence_penalty: subtract once from logits of tokens seen in the output; 0 is off.
        frequency_penalty: subtract per occurrence in the output; 0 is off.
        dry_multiplier: how hard to penalise a token with which the output would repeat an earlier sequence of tokens
            (DRY); 0 is off.
        dry_base: by how much each further token of the repetition multiplies the penalty.
        dry_allowed_length: repetitions of fewer tokens go free.
        dry_penalty_last_n: look for repetitions in so many of the last tokens of prompt and output; -1 is all.
        dry_sequence_breakers: strings across which nothing counts as repeated; of each, its last token is looked for.
        bad_words: strings that may not come about in the output, at the beginning of a word or within one.
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
        kept_special_ids: special tokens that stay in the text all the same.
        structured_outputs: what the output must look like: `StructuredOutputs`, or a mapping of its fields.
        logits_processors: functions (prompt token ids, output token ids, logits [V]) -> logits [V], called in order
            for each token, from Python only; they run in the engine's own thread, which waits for them. One that raises
            ends its own request.
        speculative: False verifies no drafts for this request; True refuses it where the engine guesses none.
        strategy: what to do with the tokens of each step, from Python only; None samples.
        output_kind: what the outputs of `AsyncLLM.generate` and `LLM.stream` hold, from Python only. The default,
            `DELTA`, costs the same at every token; `CUMULATIVE`, vLLM's default, copies the whole output each time.
            `LLM.generate` returns whole outputs whatever it is.

    Raises:
        InvalidParameter: naming the field, the value and what is allowed.
        UnknownParameter: there is no such field; the message says what to use in place of well-known ones.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    bad_words: tuple[str, ...] = ()
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
    kept_special_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = field(default=None, metadata={"has_flag": False})
    logits_processors: tuple[Callable[..., Any], ...] = field(default=(), metadata={"has_flag": False})
    speculative: bool | None = None
    strategy: Strategy[Any] | None = field(default=None, metadata={"has_flag": False})
    output_kind: RequestOutputKind = field(default=RequestOutputKind.DELTA, metadata={"has_flag": False})
    penalizes_tokens: bool = field(init=False, default=False, repr=False)
    needs_history: bool = field(init=False, default=False, repr=False)

    def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
        """Refuse unknown fields with a typed error, where the generated `__init__` has a bare `TypeError`."""
        for name in given:
            if name not in _FIELD_NAMES:
                raise UnknownParameter(
                    f"unknown sampling parameter {shown(name)}{hint_for(name, SAMPLING_HINTS, _FIELD_NAMES)}",
                    field=name,
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", integer("n", self.n, 1, MAX_N))
        if self.best_of is not None:
            put(self, "best_of", integer("best_of", self.best_of, 1, MAX_N))
            if self.best_of < self.n:
                raise InvalidParameter("best_of", self.best_of, f"at least n ({self.n})")
        put(self, "temperature", number("temperature", self.temperature, 0.0, 100.0))
        put(self, "top_k", max(integer("top_k", self.top_k, -1, 2**31 - 1), 0))
        put(self, "top_p", number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "min_p", number("min_p", self.min_p, 0.0, 1.0))
        put(self, "typical_p", number("typical_p", self.typical_p, 0.0, 1.0, open_low=True))
        put(self, "top_n_sigma", max(number("top_n_sigma", self.top_n_sigma, -1.0, 100.0), 0.0))
        repetition_penalty = number(
            "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        )
        put(self, "repetition_penalty", repetition_penalty)
        put(self, "presence_penalty", number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(self, "frequency_penalty", number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "dry_multiplier", number("dry_multiplier", self.dry_multiplier, 0.0, 100.0))
        put(self, "dry_base", number("dry_base", self.dry_base, 1.0, 100.0))
        put(self, "dry_allowed_length", integer("dry_allowed_length", self.dry_allowed_length, 1, 2**31 - 1))
        put(self, "dry_penalty_last_n", integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1))
        put(self, "dry_sequence_breakers", strings("dry_sequence_breakers", self.dry_sequence_breakers))
        put(self, "bad_words", strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        put(self, "logits_processors", processors(self.logits_processors))
        put(self, "strategy", strategy(self.strategy))
        _check_kind(self.output_kind)
        put(self, "structured_outputs", structured_outputs(self.structured_outputs))
        put(self, "logit_bias", logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, limit=MAX_ALLOWED_IDS)
            if not allowed:
                raise InvalidParameter("allowed_token_ids", (), "at least one token id, or None")
            put(self, "allowed_token_ids", allowed)
        if self.seed is not None:
            put(self, "seed", integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED))
        put(self, "stop", strings("stop", self.stop))
        put(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids, limit=MAX_STOP_IDS))
        put(self, "kept_special_ids", token_ids("kept_special_ids", self.kept_special_ids, limit=MAX_STOP_IDS))
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, getattr(self, name), "true or false")
        put(self, "speculative", speculative(self.speculative, self.strategy))
        if self.max_tokens is not None:
            put(self, "max_tokens", integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        put(self, "min_tokens", integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop", self.stop, "empty when detokenize is false (stop strings need text)")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidParameter("ignore_eos", True, "false with structured_outputs, which say where the output ends")
        put(self, "penalizes_tokens", _penalties(self) != (1.0, 0.0, 0.0))
        needs_history = self.penalizes_tokens or self.dry_multiplier or self.bad_words or self.logits_processors
        put(self, "needs_history", bool(needs_history))
        put(self, "length_penalty", _check_beams(self))

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side: samples or beams."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """True when more sequences are sampled than returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def measures_tokens(self) -> bool:
        """True when the log probability of each chosen token is wanted."""
        return self.logprobs is not None or self.is_ranked

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always chosen."""
        return self.temperature == 0.0

    def check_for_model(self, *, vocab_size: int, max_num_seqs: int) -> None:
        """Check what only the engine knows.

        Args:
            vocab_size: token ids must lie in [0, vocab_size).
            max_num_seqs: sequences that can run at once; `n`, `best_of` and `beam_width` must fit.

        Raises:
            InvalidParameter: naming the field.
        """
        if self.num_sequences > max_num_seqs:
            name = "beam_width" if self.beam_width else "best_of" if self.best_of else "n"
            raise InvalidParameter(name, self.num_sequences, f"at most max_num_seqs ({max_num_seqs})")
        for name, ids in (
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("kept_special_ids", self.kept_special_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
        ):
            if max(ids, default=0) >= vocab_size:
                raise InvalidParameter(name, max(ids), f"token ids below the vocabulary size ({vocab_size})")
            if len(ids) > vocab_size:
                raise InvalidParameter(name, f"{len(ids)} ids", f"at most the vocabulary's {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise InvalidParameter(name, count, f"at most the vocabulary size ({vocab_size})")


_FIELD_NAMES: Final = frozenset(item.name for item in fields(SamplingParams) if item.init)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _check_kind(kind: object) -> None:
    if not isinstance(kind, RequestOutputKind):
        allowed = ", ".join(f"RequestOutputKind.{name}" for name in RequestOutputKind.__members__)
        raise InvalidParameter("output_kind", kind, f"one of {allowed}")


def _check_beams(params: SamplingParams) -> float:
    """Check the parameters of a beam search, and those beside it that it would ignore, since it draws nothing.

    Args:
        params: parameters of which all others are checked.

    Returns:
        The length penalty, as a float.
    """
    length_penalty = number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if params.early_stopping != "never" and not isinstance(params.early_stopping, bool):
        raise InvalidParameter("early_stopping", params.early_stopping, 'true, false or "never"')
    if params.beam_width is None:
        for name, value, default in (
            ("length_penalty", length_penalty, 1.0),
            ("early_stopping", params.early_stopping, False),
        ):
            if value != default:
                raise InvalidParameter(name, value, f"{default} without beam_width: it belongs to beam search")
        return length_penalty
    integer("beam_width", params.beam_width, 2, MAX_BEAM_WIDTH)
    if params.best_of is not None:
        raise InvalidParameter("best_of", params.best_of, "absent beside beam_width, which says how many to compare")
    if params.strategy is not None:
        raise InvalidParameter("strategy", params.strategy, "absent beside beam_width: beam search is a strategy")
    if params.speculative:
        raise InvalidParameter("speculative", True, "false or absent beside beam_width: beams have no drafts")
    if params.n > params.beam_width:
        raise InvalidParameter("n", params.n, f"at most beam_width ({params.beam_width})")
    if params.temperature not in (0.0, 1.0):
        raise InvalidParameter("temperature", params.temperature, "0 or 1 beside beam_width: nothing is drawn")
    for name, default in CHOICE_FIELDS.items():
        if getattr(params, name) != default:
            raise InvalidParameter(name, getattr(params, name), f"{default:g} beside beam_width: nothing is drawn")
    return length_penalty
