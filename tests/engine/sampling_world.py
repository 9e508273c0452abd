"""Random requests: any combination of sampling parameters, ordinary and extreme values of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import torch

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter
from quire.sequences import SamplingParams
from quire.sequences.decoding import Edit, Sampling
from quire.sequences.sequence import Sequence as TokenSequence

SMALLEST, BELOW_ONE = math.ulp(0.0), math.nextafter(1.0, 0.0)
STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPTS = (STORY + "Then", STORY + "But", "Tom", STORY[:40], "The old sailor said:", "a b a b a b a b a", STORY * 2)
SALTS = (None, None, None, "a", "b")


class FailsLate:
    """A strategy that samples, and gives up at its third token."""

    def num_draws(self, sequence: TokenSequence) -> int:
        return Sampling().num_draws(sequence)

    def advance(self, sequence: TokenSequence, token_ids: Sequence[int]) -> Sequence[Edit]:
        if sequence.num_output >= 2:
            raise LookupError("no idea")
        return Sampling().advance(sequence, token_ids)


def never_the_same(_prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[sorted(set(output))] = -torch.inf
    return logits


def doubled(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.double() * 2.0


def beyond_float32(_prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.double() + (1e300 if len(output) > 1 else 0.0)


def _shares(*ordinary: float) -> tuple[float, ...]:
    extremes = (SMALLEST, 1e-300, 1e-46, 1e-38, 1e-8, 1 - 1e-9, BELOW_ONE, 1.0)
    return (*ordinary, *ordinary, *extremes)


# What each parameter may be; ordinary values several times.
VALUES: dict[str, Sequence[Any]] = {
    "n": (1, 2, 3, 4),
    "best_of": (None, 2, 4, 5),
    "beam_width": (2, 3, 4),
    "length_penalty": (0.0, 0.7, 1.0, -10.0, 10.0, SMALLEST),
    "early_stopping": (True, False, "never"),
    "temperature": (0.0, 0.0, 0.7, 0.7, 1.0, 1.5, SMALLEST, 1e-300, 1e-40, 1e-38, 1e-4, BELOW_ONE, 100.0),
    "top_k": (-1, 0, 1, 5, 40, 300, 2**31 - 1),
    "top_p": _shares(0.5, 0.9, 0.95),
    "min_p": (0.0, *_shares(0.05, 0.2)),
    "typical_p": _shares(0.3, 0.9),
    "top_n_sigma": (-1.0, 0.0, 1.0, 2.5, SMALLEST, 1e-300, 1e-46, 100.0),
    "repetition_penalty": (1.0, 1.1, 1.3, 0.8, 0.01, math.nextafter(1.0, 2.0), BELOW_ONE, 100.0),
    "presence_penalty": (0.0, 0.5, -0.5, 2.0, -2.0, SMALLEST, -1e-300),
    "frequency_penalty": (0.0, 0.4, -0.3, 2.0, -2.0, SMALLEST, 1e-46),
    "dry_multiplier": (0.0, 0.8, 2.0, SMALLEST, 1e-46, 100.0),
    "dry_base": (1.0, 1.75, 100.0, math.nextafter(1.0, 2.0)),
    "dry_allowed_length": (1, 2, 5, 2**31 - 1),
    "dry_penalty_last_n": (-1, 0, 1, 30, 2**31 - 1),
    "dry_sequence_breakers": ((), ("\n", ":", '"', "*"), ("fox",)),
    "bad_words": ((), ("fox",), ("the", "a", "kite"), ("was happy",)),
    "logit_bias": (None, {5: 100.0, 300: -100.0}, {264: SMALLEST, 290: -1e-300}, dict.fromkeys(range(200, 280), 3.5)),
    "allowed_token_ids": (None, tuple(range(100, 900)), (264, 290, 300), (17,)),
    "seed": (0, 1, 2**63 - 1, -(2**63)),
    "stop": ((), ("fox",), ("e",), (" the", "and", "\n")),
    "stop_token_ids": ((), (264,), tuple(range(200, 260))),
    "include_stop_str_in_output": (False, True),
    "ignore_eos": (False, True),
    "max_tokens": (1, 2, 5, 9, 20, 40, None),
    "min_tokens": (0, 1, 4, 9),
    "logprobs": (None, 0, 1, 3, 64),
    "prompt_logprobs": (None, 0, 2, 64),
    "detokenize": (True, False),
    "skip_special_tokens": (True, False),
    "kept_special_ids": ((), (0, 1, 2)),
    "structured_outputs": (
        None,
        {"choice": ["yes", "no", "not at all"]},
        {"regex": "[a-z ]{1,12}[.!]"},
        {"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
    ),
    "logits_processors": ((), (never_the_same,), (doubled, never_the_same), (beyond_float32,)),
    "speculative": (None, None, False, True),
    "strategy": (None, Sampling(), FailsLate()),
}
# `output_kind` is about what streams show of an output, and nothing that the engine looks at.
# What thinking is, chats say; tests/engine/test_thinking.py has its values.
# The hand-over of blocks needs an engine with a role: tests/engine/test_hand_over.py.
drawn = {*VALUES, "output_kind", "thinking", "thinking_token_budget", "extra_args"}
assert drawn == {item.name for item in fields(SamplingParams) if item.init}, "a parameter is never drawn"
# Parameters that refuse most others beside them, or end most outputs.
RARE = {"beam_width": 0.2, "structured_outputs": 0.15, "strategy": 0.15, "allowed_token_ids": 0.15, "best_of": 0.15}


@dataclass(frozen=True)
class Asked:
    """A request, as it is asked of an engine.

    Args:
        prompt: a text.
        params: valid parameters.
        options: of `Engine.add_request`.
        delay: steps that it comes after the request before it.
    """

    prompt: str
    params: SamplingParams
    options: dict[str, Any]
    delay: int


def asked(random: Random) -> Asked:
    """Return a random request with valid parameters."""
    share = random.choice((0.05, 0.15, 0.4))
    given = {name: random.choice(VALUES[name]) for name in VALUES if random.random() < RARE.get(name, share)}
    # Without these, an output depends on how many requests came before it, and may be long.
    given |= {name: random.choice(VALUES[name]) for name in ("seed", "max_tokens")}
    options = {
        "cache_salt": random.choice(SALTS),
        "retain_cache": random.random() < 0.2,
        "priority": random.choice((0, 0, -5, 2**31 - 1)),
    }
    return Asked(random.choice(PROMPTS), _valid(given), options, random.choice((0, 0, 0, 1, 4)))


def each_value() -> list[Asked]:
    """Return a request for each value of each parameter, with nothing else asked that this value does not need."""
    found: list[Asked] = []
    for name, values in VALUES.items():
        needed: dict[str, float] = {}
        if name in ("length_penalty", "early_stopping"):
            needed = {"beam_width": 2}
        elif name.startswith("dry_") and name != "dry_multiplier":
            needed = {"dry_multiplier": 1.0}
        for value in dict.fromkeys(map(repr, values)):
            given: dict[str, Any] = {"seed": 7, "max_tokens": 9, **needed}
            given[name] = next(one for one in values if repr(one) == value)
            found.append(Asked(PROMPTS[len(found) % len(PROMPTS)], _valid(given), {}, 0))
    return found


def _valid(given: dict[str, Any]) -> SamplingParams:
    """Return parameters, without those that are refused beside the others."""
    while True:
        try:
            return SamplingParams(**given)
        except InvalidParameter as error:
            # The default of another parameter may be what is refused.
            del given[error.field if error.field in given else "beam_width"]  # type: ignore[arg-type]


def told(output: RequestOutput) -> Any:
    """Return what a client is told of a request, without what depends on its company.

    Of a request that failed that is why: how far its samples are by then depends on who else ran.
    """
    if output.error is not None:
        return output.error, output.error_code
    samples = [
        (
            sample.index,
            sample.token_ids,
            sample.text,
            sample.logprobs,
            sample.cumulative_logprob,
            sample.beam_score,
            sample.finish_reason,
            sample.stop_reason,
        )
        for sample in output.outputs
    ]
    return samples, output.prompt_logprobs, output.num_pruned_tokens
