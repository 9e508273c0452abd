"""Workloads of token ids, the same for every engine; seeded, so that runs are repeatable.

| name | requests |
|---|---|
| W1 | one stream: a 32-token prompt, 128 new tokens |
| W2 | one prompt of 1024 tokens, 1 new token |
| W3 | 16 requests at once, prompts uniform in 64..512, outputs uniform in 32..128 |
| W4 | 4 prompts of 4096 tokens, 64 new tokens each |
| W5 | 16 requests that share their first 512 tokens, 32 tokens of their own, 32 new tokens |
| W6 | one stream at a long context: a prompt of 4096 (`W6-4k`) or 16384 tokens (`W6-16k`), 64 new tokens |

W5 has three variants: `W5-cold` (the prefix is not cached), `W5-warm` (a request with this prefix was served before)
and `W5-off` (prefix caching disabled). Every run has different tokens, so that no run hits another run's blocks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.errors import ConfigError

PLAIN_IDS = range(256, 128000)  # plain tokens of the vocabularies of Qwen3 and Llama 3
RUN_STRIDE = 1000  # run r draws its tokens with the workload's seed + RUN_STRIDE * r
NAMES = ("W1", "W2", "W3", "W4", "W5-cold", "W5-warm", "W5-off", "W6-4k", "W6-16k")
MAX_SIGMA = 4.0

Lengths = Literal["uniform", "lognormal"]


class BenchRequest(NamedTuple):
    """A prompt of token ids, and the number of new tokens."""

    prompt: list[int]
    num_new: int


class Workload(NamedTuple):
    """The requests of one measured run.

    Args:
        requests: timed requests, all sent at once.
        before: untimed requests, served first.
    """

    requests: list[BenchRequest]
    before: list[BenchRequest]

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(request.prompt) + request.num_new for request in self.requests)

    @property
    def num_new(self) -> int:
        """Number of new tokens of all requests."""
        return sum(request.num_new for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """The parameters of a synthetic workload.

    Args:
        num_prompts: number of requests.
        input_len: mean number of tokens of a prompt, including the shared prefix.
        output_len: mean number of new tokens of a request; end-of-sequence tokens are ignored.
        lengths: distribution of both lengths.
        spread: uniform lengths are between (1 - spread) and (1 + spread) times the mean; the standard deviation of the
            logarithm of lognormal lengths.
        shared_prefix: number of tokens that all prompts start with.
        workload_seed: seed of lengths, tokens and arrivals.

    Raises:
        ConfigError: a number is outside its range.
    """

    num_prompts: int = 16
    input_len: int = 128
    output_len: int = 64
    lengths: Lengths = "uniform"
    spread: float = 0.0
    shared_prefix: int = 0
    workload_seed: int = 0

    def __post_init__(self) -> None:
        most = 1.0 if self.lengths == "uniform" else MAX_SIGMA
        if not 0.0 <= self.spread <= most:
            raise ConfigError(
                f"spread must be a number from 0 to {most:g} for {self.lengths} lengths, got {self.spread}",
                field="spread",
            )
        if not 0 <= self.shared_prefix < self.input_len:
            raise ConfigError(
                f"shared_prefix must be from 0 to input_len - 1 ({self.input_len - 1}), got {self.shared_prefix}",
                field="shared_prefix",
            )

    def requests(self, ids: range) -> list[BenchRequest]:
        """Return the requests, with random tokens of `ids`."""
        rng = random.Random(self.workload_seed)
        prefix = _token_ids(rng, self.shared_prefix, ids)
        requests = []
        for _ in range(self.num_prompts):
            # A prompt has at least one token after the prefix.
            num_own = max(1, self._length(rng, self.input_len) - len(prefix))
            requests.append(BenchRequest(prefix + _token_ids(rng, num_own, ids), self._length(rng, self.output_len)))
        return requests

    def _length(self, rng: random.Random, mean: int) -> int:
        if self.lengths == "uniform":
            factor = rng.uniform(1 - self.spread, 1 + self.spread)
        else:
            factor = math.exp(rng.gauss(-(self.spread**2) / 2, self.spread))
        return max(1, round(mean * factor))


def workload(name: str, run: int, ids: range = PLAIN_IDS) -> Workload:
    """Return run `run` of the workload `name`, with tokens of `ids`."""
    if name.startswith("W5"):
        return shared_prefix(run, ids, seen=name == "W5-warm")
    if name.startswith("W6"):
        return Workload(long_context(run, ids, {"W6-4k": 4096, "W6-16k": 16384}[name]), before=[])
    build = {"W1": one_stream, "W2": one_long_prompt, "W3": mixed, "W4": long_contexts}[name]
    return Workload(build(run, ids), before=[])


def one_stream(run: int, ids: range) -> list[BenchRequest]:
    """Return W1."""
    return [BenchRequest(_token_ids(_rng(11, run), 32, ids), 128)]


def one_long_prompt(run: int, ids: range) -> list[BenchRequest]:
    """Return W2."""
    return [BenchRequest(_token_ids(_rng(22, run), 1024, ids), 1)]


def mixed(run: int, ids: range) -> list[BenchRequest]:
    """Return W3; lengths are the same in every run, tokens differ."""
    prompt_lengths, output_lengths, tokens = random.Random(0), random.Random(1), _rng(33, run)
    lengths = [prompt_lengths.randint(64, 512) for _ in range(16)]
    return [BenchRequest(_token_ids(tokens, length, ids), output_lengths.randint(32, 128)) for length in lengths]


def long_contexts(run: int, ids: range) -> list[BenchRequest]:
    """Return W4."""
    tokens = _rng(44, run)
    return [BenchRequest(_token_ids(tokens, 4096, ids), 64) for _ in range(4)]


def shared_prefix(run: int, ids: range, *, seen: bool) -> Workload:
    """Return W5; with `seen`, an untimed request with the same prefix is served first."""
    prefix, tails = _token_ids(_rng(55, run), 512, ids), _rng(56, run)
    requests = [BenchRequest(prefix + _token_ids(tails, 32, ids), 32) for _ in range(16)]
    return Workload(requests, before=[BenchRequest(prefix + [7] * 32, 1)] if seen else [])


def long_context(run: int, ids: range, length: int) -> list[BenchRequest]:
    """Return W6 with a prompt of `length` tokens."""
    return [BenchRequest(_token_ids(_rng(66, run), length, ids), 64)]


def _rng(seed: int, run: int) -> random.Random:
    return random.Random(seed + RUN_STRIDE * run)


def _token_ids(rng: random.Random, count: int, ids: range) -> list[int]:
    return [rng.randrange(ids.start, ids.stop) for _ in range(count)]
