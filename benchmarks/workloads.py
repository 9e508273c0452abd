"""Five workloads of token ids, the same for every engine; seeded, so that a run can be repeated.

| name | what |
|---|---|
| W1 | one stream: a 32-token prompt, 128 new tokens |
| W2 | one prompt of 1024 tokens, 1 new token |
| W3 | 16 requests at once, prompts uniform in 64..512, outputs uniform in 32..128 |
| W4 | 4 prompts of 4096 tokens, 64 new tokens each |
| W5 | 16 requests that share their first 512 tokens, 32 tokens of their own, 32 new tokens |

W5 comes in three: `W5-cold` (nobody has seen the prefix), `W5-warm` (a request with this prefix has been served) and
`W5-off` (prefix caching disabled). Every run has tokens of its own, so that no run finds another's blocks.
"""

from __future__ import annotations

import random
from typing import NamedTuple

FIRST_ID, PAST_LAST_ID = 256, 128000  # plain tokens of all vocabularies of `make_model`
RUN_STRIDE = 1000  # run r draws its tokens with the workload's seed + RUN_STRIDE * r
NAMES = ("W1", "W2", "W3", "W4", "W5-cold", "W5-warm", "W5-off")


class Request(NamedTuple):
    """A prompt of token ids, and how many new tokens are wanted."""

    prompt: list[int]
    num_new: int


class Workload(NamedTuple):
    """What one run does.

    Args:
        requests: all sent at once; this is what is timed.
        before: served first, untimed.
    """

    requests: list[Request]
    before: list[Request]

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_new(self) -> int:
        """New tokens of all requests."""
        return sum(request.num_new for request in self.requests)


def workload(name: str, run: int) -> Workload:
    """Return run `run` of the workload `name`."""
    if name.startswith("W5"):
        return shared_prefix(run, seen=name == "W5-warm")
    build = {"W1": one_stream, "W2": one_long_prompt, "W3": mixed, "W4": long_contexts}[name]
    return Workload(build(run), before=[])


def one_stream(run: int) -> list[Request]:
    """Return W1."""
    return [Request(_token_ids(_rng(11, run), 32), 128)]


def one_long_prompt(run: int) -> list[Request]:
    """Return W2."""
    return [Request(_token_ids(_rng(22, run), 1024), 1)]


def mixed(run: int) -> list[Request]:
    """Return W3; lengths are the same in every run, tokens are not."""
    prompt_lengths, output_lengths, tokens = random.Random(0), random.Random(1), _rng(33, run)
    lengths = [prompt_lengths.randint(64, 512) for _ in range(16)]
    return [Request(_token_ids(tokens, length), output_lengths.randint(32, 128)) for length in lengths]


def long_contexts(run: int) -> list[Request]:
    """Return W4."""
    tokens = _rng(44, run)
    return [Request(_token_ids(tokens, 4096), 64) for _ in range(4)]


def shared_prefix(run: int, *, seen: bool) -> Workload:
    """Return W5, whose prefix a request before the run has shown to the engine when `seen`."""
    prefix, tails = _token_ids(_rng(55, run), 512), _rng(56, run)
    requests = [Request(prefix + _token_ids(tails, 32), 32) for _ in range(16)]
    return Workload(requests, before=[Request(prefix + [7] * 32, 1)] if seen else [])


def _rng(seed: int, run: int) -> random.Random:
    return random.Random(seed + RUN_STRIDE * run)


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, PAST_LAST_ID) for _ in range(count)]
