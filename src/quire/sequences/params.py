"""Sampling parameters and their validator, which Python, HTTP and the command line share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Any, Final

from quire.config.hints import SAMPLING_HINTS, hint_for
from quire.errors import InvalidParameter, UnknownParameter, shown
from quire.sequences.kv_transfer import NAME as KV_TRANSFER
from quire.sequences.kv_transfer import KVTransferParams, read_extra_args
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
from quire.sequences.thinking import ThinkingTokens

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOP_IDS = 64
# Larger than any vocabulary; `check_for_model` checks against the real size.
MAX_ALLOWED_IDS = 2**20
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 32_768
MAX_SEED = 2**63 - 1
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0
# Parameters of random sampling with their neutral values. A model may recommend other values.
CHOICE_FIELDS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0}
NO_CHOICE = {"temperature": 1.0, **CHOICE_FIELDS}
# Logits are divided by it and must stay finite in float32; the bounds are reciprocal.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
# Metadata of parameters that device sampling supports, or that do not affect sampling: see `needs_host`.
_ON_DEVICE: Final = {"on_device": True}
# Metadata of parameters without a flag on the command line and without a field in HTTP bodies.
_NO_FLAG: Final = {"has_flag": False}


class RequestOutputKind(Enum):
    """Content of each output of a stream, with vLLM's names."""

    CUMULATIVE = 0  # whole output so far
    DELTA = 1  # new part since the previous output
    FINAL_ONLY = 2  # whole output, once, when the request has finished


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and defaults.

    Every instance is valid: construction and assignment run the validator, and the engine copies the parameters of a
    request. Limits that depend on the model (vocabulary, context length, `max_num_seqs`) are checked by
    `check_for_model` when the engine gets the request.

    Args:
        n: number of sequences to sample from one prompt; the prompt is computed once and forked.
        best_of: number of sequences to sample; the `n` with the highest mean log probability per token are returned,
            best first. None samples `n`.
        beam_width: number of beams of a beam search, which returns the `n` best outputs, best first. None samples.
        length_penalty: scores of a beam search are divided by the output's length to this power.
        early_stopping: end of a beam search: True ends it as soon as `beam_width` outputs have finished; False when no
            running beam, ending now, would be better than those; "never" when no beam could become better.
        temperature: divisor of the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose total probability reaches this; 1 keeps all.
        min_p: drop tokens whose probability is below this fraction of the highest one; 0 drops none.
        typical_p: keep the tokens whose surprise is closest to the expected one, until their total probability reaches
            this; 1 keeps all.
        top_n_sigma: drop tokens whose logit is more than this number of standard deviations below the highest; 0 or -1
            drops none.
        repetition_penalty: divide (multiply, when negative) logits of tokens seen in prompt or output, from 0.01 to
            100; 1 is off.
        presence_penalty: subtract once from logits of tokens seen in the output; 0 is off.
        frequency_penalty: subtract per occurrence in the output; 0 is off.
        dry_multiplier: penalty of a token that would continue a repetition of an earlier sequence of tokens (DRY); 0
            is off.
        dry_base: factor of the penalty for each further token of the repetition.
        dry_allowed_length: shorter repetitions are not penalised.
        dry_penalty_last_n: number of last tokens of prompt and output that are searched for repetitions; -1 is all.
        dry_sequence_breakers: strings that end a repetition; the last token of each is compared.
        bad_words: strings that may not occur in the output, at the beginning of a word or within one.
        logit_bias: token id -> value added to its logit.
        allowed_token_ids: if given, only these tokens can be sampled.
        seed: makes the request's tokens a function of its own prompt and parameters alone; -1 is no seed.
        stop: strings that end the output; not included in it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output; the id is kept in `token_ids`, its text only with
            `include_stop_str_in_output`.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the output.
        ignore_eos: generate past the model's end-of-sequence tokens.
        max_tokens: maximum number of new tokens; none takes the rest of the context.
        min_tokens: minimum number of new tokens before an end-of-sequence or stop token may be sampled.
        logprobs: number of likeliest tokens whose log probabilities are returned per position, with the chosen token's.
        prompt_logprobs: number of likeliest tokens whose log probabilities are returned per position of the prompt.
        detokenize: make text of the tokens.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_ids: special tokens that stay in the text nevertheless.
        structured_outputs: required form of the output: `StructuredOutputs`, or a mapping of its fields.
        thinking: markers of the model's thinking, as `ReasoningModel.sampling` returns them: `structured_outputs` then
            apply from the end of thinking on. None treats the whole output alike.
        thinking_token_budget: maximum number of thinking tokens, after which the tokens that end thinking are forced;
            needs `thinking`, which chats set if the model's chat template shows its markers.
        logits_processors: functions (prompt token ids, output token ids, logits [V]) -> logits [V], called in order
            for each token, from Python only; they block the engine's thread. One that raises ends its own request.
        speculative: False verifies no drafts for this request; True refuses it where the engine makes none; None takes
            drafts where there are some.
        strategy: custom decoding strategy, from Python only; None samples.
        extra_args: vLLM's place for `kv_transfer_params`, a mapping of fields of `KVTransferParams`, and nothing else.
        output_kind: content of the outputs of `AsyncLLM.generate` and `LLM.stream`, from Python only. The default,
            `DELTA`, costs the same at every token; `CUMULATIVE`, vLLM's default, copies the whole output each time.
            `LLM.generate` always returns whole outputs.

    Attributes:
        num_sequences: number of sequences that run at once: samples or beams.
        is_ranked: True if more sequences are sampled than returned.
        is_greedy: True if the likeliest token is always chosen.
        measures_tokens: True if the log probability of each chosen token is needed.
        penalizes_tokens: True if a repetition, presence or frequency penalty is set.
        needs_history: True if the logits processing depends on the tokens before.
        adjusts_logits: True if a parameter other than a grammar changes the logits at every position; `min_tokens` does
            at the first ones.
        is_constrained: True if the next token depends on a state that the host updates after it has read the previous
            token.
        needs_host: True if a parameter is set that device sampling does not support, by the metadata of its field.

    Raises:
        InvalidParameter: a value is not allowed; the message names the field, the value and the allowed values.
        UnknownParameter: no such field; for well-known names the message names a replacement.
    """

    n: int = field(default=1, metadata=_ON_DEVICE)
    best_of: int | None = field(default=None, metadata=_ON_DEVICE)
    beam_width: int | None = None
    length_penalty: float = field(default=1.0, metadata=_ON_DEVICE)
    early_stopping: bool | str = field(default=False, metadata=_ON_DEVICE)
    temperature: float = field(default=1.0, metadata=_ON_DEVICE)
    top_k: int = field(default=0, metadata=_ON_DEVICE)
    top_p: float = field(default=1.0, metadata=_ON_DEVICE)
    min_p: float = field(default=0.0, metadata=_ON_DEVICE)
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = field(default=1.0, metadata=_ON_DEVICE)
    presence_penalty: float = field(default=0.0, metadata=_ON_DEVICE)
    frequency_penalty: float = field(default=0.0, metadata=_ON_DEVICE)
    dry_multiplier: float = 0.0
    dry_base: float = field(default=1.75, metadata=_ON_DEVICE)
    dry_allowed_length: int = field(default=2, metadata=_ON_DEVICE)
    dry_penalty_last_n: int = field(default=-1, metadata=_ON_DEVICE)
    dry_sequence_breakers: tuple[str, ...] = field(default=("\n", ":", '"', "*"), metadata=_ON_DEVICE)
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = field(default=None, metadata=_ON_DEVICE)
    stop: tuple[str, ...] = field(default=(), metadata=_ON_DEVICE)
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_ON_DEVICE)
    include_stop_str_in_output: bool = field(default=False, metadata=_ON_DEVICE)
    ignore_eos: bool = field(default=False, metadata=_ON_DEVICE)
    max_tokens: int | None = field(default=16, metadata=_ON_DEVICE)
    min_tokens: int = field(default=0, metadata=_ON_DEVICE)
    logprobs: int | None = field(default=None, metadata=_ON_DEVICE)
    prompt_logprobs: int | None = field(default=None, metadata=_ON_DEVICE)
    detokenize: bool = field(default=True, metadata=_ON_DEVICE)
    skip_special_tokens: bool = field(default=True, metadata=_ON_DEVICE)
    kept_special_ids: tuple[int, ...] = field(default=(), metadata=_ON_DEVICE)
    structured_outputs: StructuredOutputs | None = field(default=None, metadata=_ON_DEVICE | _NO_FLAG)
    thinking: ThinkingTokens | None = field(default=None, metadata=_ON_DEVICE | _NO_FLAG)
    thinking_token_budget: int | None = field(default=None, metadata=_ON_DEVICE | _NO_FLAG)
    logits_processors: tuple[Callable[..., Any], ...] = field(default=(), metadata=_NO_FLAG)
    speculative: bool | None = field(default=None, metadata=_ON_DEVICE)
    strategy: Strategy[Any] | None = field(default=None, metadata=_ON_DEVICE | _NO_FLAG)
    extra_args: Mapping[str, Any] | None = field(default=None, metadata=_ON_DEVICE | _NO_FLAG)
    output_kind: RequestOutputKind = field(default=RequestOutputKind.DELTA, metadata=_ON_DEVICE | _NO_FLAG)
    # Derived from the parameters above, once: every step reads some of them.
    num_sequences: int = field(init=False, default=1, repr=False)
    is_ranked: bool = field(init=False, default=False, repr=False)
    is_greedy: bool = field(init=False, default=False, repr=False)
    measures_tokens: bool = field(init=False, default=False, repr=False)
    penalizes_tokens: bool = field(init=False, default=False, repr=False)
    needs_history: bool = field(init=False, default=False, repr=False)
    adjusts_logits: bool = field(init=False, default=False, repr=False)
    is_constrained: bool = field(init=False, default=False, repr=False)
    needs_host: bool = field(init=False, default=False, repr=False)
    # The last field, so that copying and unpickling set all others without a check.
    is_checked: bool = field(init=False, default=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **options: Any) -> SamplingParams:
        """Refuse unknown fields with a typed error; the generated `__init__` would raise a bare `TypeError`."""
        for name in options:
            _check_name(cls, name)
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field; values that are not allowed raise the errors of the constructor and change nothing."""
        if not getattr(self, "is_checked", False):
            object.__setattr__(self, name, value)
            return
        _check_name(type(self), name)
        checked = replace(self, **{name: value})
        for item in fields(self):
            object.__setattr__(self, item.name, getattr(checked, item.name))

    def clone(self) -> SamplingParams:
        """Return a copy that later assignments do not change."""
        new = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(new, name, getattr(self, name))
        return new

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
        put(self, "bad_words", strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS))
        put(self, "logits_processors", processors(self.logits_processors))
        put(self, "strategy", strategy(self.strategy))
        _check_kind(self.output_kind)
        if self.structured_outputs is not None:
            put(self, "structured_outputs", structured_outputs(self.structured_outputs))
        put(self, "logit_bias", logit_bias(self.logit_bias))
        if self.extra_args is not None:
            put(self, "extra_args", read_extra_args(self.extra_args))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, limit=MAX_ALLOWED_IDS)
            if not allowed:
                raise InvalidParameter("allowed_token_ids", (), "at least one token id, or None")
            put(self, "allowed_token_ids", allowed)
        seed = None if self.seed is None else integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        put(self, "seed", None if seed == -1 else seed)
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
        _check_form(self)
        put(self, "length_penalty", _check_beams(self))
        for name, value in _derived(self).items():
            put(self, name, value)
        put(self, "is_checked", True)

    @property
    def kv_transfer(self) -> KVTransferParams | None:
        """Parameters of the transfer of the prompt's blocks; None for no transfer."""
        return None if self.extra_args is None else self.extra_args[KV_TRANSFER]

    def check_for_model(self, *, vocab_size: int, max_num_seqs: int) -> None:
        """Check the limits of the model and the engine.

        Args:
            vocab_size: size of the vocabulary; token ids must lie in [0, vocab_size).
            max_num_seqs: maximum number of running sequences; limit of `n`, `best_of` and `beam_width`.

        Raises:
            InvalidParameter: a value exceeds a limit; the message names the field.
        """
        if self.num_sequences > max_num_seqs:
            name = "beam_width" if self.beam_width else "best_of" if self.best_of else "n"
            raise InvalidParameter(name, self.num_sequences, f"at most max_num_seqs ({max_num_seqs})")
        for name, ids in (
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("kept_special_ids", self.kept_special_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
            ("thinking", self.thinking.all_ids if self.thinking is not None else ()),
        ):
            if max(ids, default=0) >= vocab_size:
                raise InvalidParameter(name, max(ids), f"token ids below the vocabulary size ({vocab_size})")
            if len(ids) > vocab_size:
                raise InvalidParameter(name, f"{len(ids)} ids", f"at most the vocabulary's {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise InvalidParameter(name, count, f"at most the vocabulary size ({vocab_size})")


def _check_name(cls: type[Any], name: str) -> None:
    """Check that a class of parameters has a parameter of this name that is not derived from others."""
    item = cls.__dataclass_fields__.get(name)
    if item is None or not item.init:
        hint = hint_for(name, SAMPLING_HINTS, {item.name for item in fields(cls) if item.init})
        raise UnknownParameter(f"unknown sampling parameter {shown(name)}{hint}", field=name)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _check_form(params: SamplingParams) -> None:
    """Check the parameters of the form and the end of an output: grammar, thinking and its budget."""
    if params.structured_outputs is not None and params.ignore_eos:
        raise InvalidParameter("ignore_eos", True, "false with structured_outputs, which say where the output ends")
    thinking: object = params.thinking
    budget: object = params.thinking_token_budget
    if thinking is not None and not isinstance(thinking, ThinkingTokens):
        raise InvalidParameter("thinking", thinking, "ThinkingTokens or None")
    if budget is not None:
        integer("thinking_token_budget", budget, 0, 2**31 - 1)


def _derived(params: SamplingParams) -> dict[str, Any]:
    """Return the values of the derived fields."""
    is_ranked = params.best_of is not None and params.best_of > params.n
    penalizes_tokens = _penalties(params) != (1.0, 0.0, 0.0)
    needs_history = bool(penalizes_tokens or params.dry_multiplier or params.bad_words or params.logits_processors)
    kind: Any = type(params)
    return {
        "num_sequences": params.beam_width or params.best_of or params.n,
        "is_ranked": is_ranked,
        "is_greedy": params.temperature == 0.0,
        "measures_tokens": params.logprobs is not None or is_ranked,
        "penalizes_tokens": penalizes_tokens,
        "needs_history": needs_history,
        "adjusts_logits": needs_history or bool(params.logit_bias) or params.allowed_token_ids is not None,
        "is_constrained": params.structured_outputs is not None or params.thinking_token_budget is not None,
        "needs_host": any(getattr(params, name) != default for name, default in _host_fields(kind)),
    }


@cache
def _host_fields(cls: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields that device sampling does not support, with their defaults."""
    return tuple(
        (item.name, item.default) for item in fields(cls) if item.init and not item.metadata.get("on_device", False)
    )


def _check_kind(kind: object) -> None:
    if not isinstance(kind, RequestOutputKind):
        allowed = ", ".join(f"RequestOutputKind.{name}" for name in RequestOutputKind.__members__)
        raise InvalidParameter("output_kind", kind, f"one of {allowed}")


def _check_beams(params: SamplingParams) -> float:
    """Check the parameters of a beam search, and refuse sampling parameters that it would ignore."""
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
        raise InvalidParameter("best_of", params.best_of, "absent with beam_width, which sets the number of beams")
    if params.strategy is not None:
        raise InvalidParameter("strategy", params.strategy, "absent with beam_width: beam search is a strategy")
    if params.speculative:
        raise InvalidParameter("speculative", True, "false or absent with beam_width: beams have no drafts")
    if params.n > params.beam_width:
        raise InvalidParameter("n", params.n, f"at most beam_width ({params.beam_width})")
    if params.temperature not in (0.0, 1.0):
        raise InvalidParameter("temperature", params.temperature, "0 or 1 with beam_width: nothing is drawn")
    for name, default in CHOICE_FIELDS.items():
        if getattr(params, name) != default:
            raise InvalidParameter(name, getattr(params, name), f"{default:g} with beam_width: nothing is drawn")
    return length_penalty
