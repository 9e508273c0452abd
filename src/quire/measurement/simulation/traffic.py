"""Synthetic traffic: arrivals, lengths, shared system prompts, conversations and agents, from a seed.

```
 session  [ system prompt ][ user ][ answer ][ user ][ answer ] ...     a turn's prompt is all text before its answer
          |<-- shared  -->|<-- of this session only -->|
```
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from quire.errors import ConfigError, shown
from quire.measurement.simulation.replicas.tokens import MAX_STREAMS, TokenSpan, num_tokens
from quire.measurement.simulation.request import SimulatedRequest

MAX_REQUESTS = 100_000_000
MAX_LENGTH = 1 << 20
MAX_TURNS = 10_000
# First stream of sessions; messages and answers of a session have the numbers after all earlier sessions' streams.
_FIRST_STREAM = 1 << 16


class TrafficSource(Protocol):
    """The requests of one run, which depend on the seed only.

    Attributes:
        num_shortened: number of requests so far that were cut to the longest context.
        num_too_long: number of requests so far whose prompts leave no room in it for a new token; they are left out.
    """

    num_shortened: int
    num_too_long: int

    def requests(self) -> Iterator[SimulatedRequest]:
        """Yield the requests that do not follow another one, in the order of their arrivals."""

    def follow_up(self, ended: SimulatedRequest, now_s: float) -> SimulatedRequest | None:
        """Return the request that follows an ended one, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShape:
    """The statistics of synthetic traffic. Lengths are in tokens and lognormal unless a deviation is 0.

    Args:
        num_requests: number of requests, counting all turns; fewer if sessions end at `max_context`.
        rate: requests per second on average, counting all turns.
        burstiness: coefficient of variation of the gaps between arrivals of sessions (standard deviation by mean): 1
            is a Poisson process, more comes in bursts, 0 is a clock.
        input_len, input_sigma: mean length of a user's message, and standard deviation of its logarithm.
        output_len, output_sigma: the same for an answer.
        turns: mean number of turns of a session; the number is geometric, or constant with `fixed_turns`.
        fixed_turns: True if all sessions have the same number of turns.
        think_s: mean seconds between an answer and the next turn; exponential.
        system_len: tokens of a system prompt, with which every session begins; 0 for none.
        num_systems: number of system prompts; each session has one, the first ones more often (Zipf's law).
        max_context: maximum number of tokens of a prompt and its answer; a session ends before it is exceeded.

    Raises:
        ConfigError: a value is outside its range.
    """

    num_requests: int = 1000
    rate: float = 1.0
    burstiness: float = 1.0
    input_len: int = 512
    input_sigma: float = 0.0
    output_len: int = 128
    output_sigma: float = 0.0
    turns: float = 1.0
    fixed_turns: bool = False
    think_s: float = 10.0
    system_len: int = 0
    num_systems: int = 1
    max_context: int = 32768

    def __post_init__(self) -> None:
        ranges: Mapping[str, tuple[float, float]] = {
            "num_requests": (1, MAX_REQUESTS),
            "rate": (1e-9, 1e9),
            "burstiness": (0, 100),
            "input_len": (1, MAX_LENGTH),
            "input_sigma": (0, 4),
            "output_len": (1, MAX_LENGTH),
            "output_sigma": (0, 4),
            "turns": (1, MAX_TURNS),
            "think_s": (0, 1e6),
            "system_len": (0, MAX_LENGTH),
            "num_systems": (1, _FIRST_STREAM),
            "max_context": (2, MAX_LENGTH),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "fixed_turns":
                if type(value) is not bool:
                    raise ConfigError(f"fixed_turns must be True or False, got {shown(value)}", field="fixed_turns")
                continue
            low, high = ranges[field.name]
            kinds = (int,) if field.type == "int" else (int, float)
            if type(value) not in kinds or not low <= value <= high:
                kind = "a whole number" if field.type == "int" else "a number"
                raise ConfigError(
                    f"{field.name} must be {kind} from {low:g} to {high:g}, got {shown(value)}", field=field.name
                )
        if self.system_len + 2 > self.max_context:
            raise ConfigError(
                f"system_len must be at most max_context - 2 ({self.max_context - 2}), got {self.system_len}",
                field="system_len",
            )


def lognormal_sigma(mean: float, median: float) -> float:
    """Return the standard deviation of the logarithm of lognormal lengths with this mean and median."""
    return math.sqrt(2 * math.log(mean / median))


# Shapes after published statistics; docs/simulate.md has the sources. Other fields have `TrafficShape`'s defaults.
TRAFFIC: Mapping[str, Mapping[str, float]] = {
    "uniform": {},
    "sharegpt": {"input_len": 161, "input_sigma": 1.0, "output_len": 338, "output_sigma": 0.8},
    "azure-chat": {
        "input_len": 1155,
        "input_sigma": lognormal_sigma(1155, 1020),
        "output_len": 211,
        "output_sigma": lognormal_sigma(211, 129),
        "max_context": 16384,
    },
    "azure-code": {
        "input_len": 2048,
        "input_sigma": lognormal_sigma(2048, 1500),
        "output_len": 28,
        "output_sigma": lognormal_sigma(28, 13),
        "max_context": 16384,
    },
    "chat-sessions": {
        "input_len": 70,
        "input_sigma": 1.0,
        "output_len": 215,
        "output_sigma": 0.8,
        "turns": 6,
        "think_s": 30,
        "system_len": 512,
        "num_systems": 4,
    },
    "agents": {
        "input_len": 400,
        "input_sigma": 1.0,
        "output_len": 150,
        "output_sigma": 0.8,
        "turns": 62,
        "think_s": 2,
        "system_len": 4096,
        "num_systems": 4,
        "max_context": 131072,
    },
}


class _Session:
    """A session between two turns."""

    __slots__ = ("left", "next_stream", "rng", "spans")

    def __init__(self, rng: random.Random, spans: tuple[TokenSpan, ...], left: int, next_stream: int) -> None:
        self.rng = rng
        self.spans = spans
        self.left = left
        self.next_stream = next_stream


class SyntheticTraffic:
    """Synthetic requests.

    Args:
        shape: statistics of the requests.
        seed: seed of all random numbers; each session of several turns has its own generator, so that lengths do not
            depend on the times at which answers end.
    """

    def __init__(self, shape: TrafficShape, seed: int) -> None:
        self.shape = shape
        self.num_shortened = self.num_too_long = 0
        self._seed = seed
        self._sessions: dict[int, _Session] = {}

    def requests(self) -> Iterator[SimulatedRequest]:
        """Yield the first turn of each session."""
        shape = self.shape
        rng, now_s, num_planned, idx, stream = random.Random(f"arrivals {self._seed}"), 0.0, 0, 0, _FIRST_STREAM
        weights = [1 / (rank + 1) for rank in range(shape.num_systems)]
        while num_planned < shape.num_requests:
            now_s += self._gap_s(rng)
            turns = min(self._turns(rng), shape.num_requests - num_planned)
            num_planned += turns
            system = rng.choices(range(shape.num_systems), weights)[0] if shape.num_systems > 1 else 0
            spans = (TokenSpan(system, 0, shape.system_len),) if shape.system_len else ()
            if stream + 2 * turns > MAX_STREAMS:
                raise ConfigError(f"num_requests has more than {MAX_STREAMS:,} messages", field="num_requests")
            session_rng = rng if turns == 1 else random.Random(f"session {self._seed} {idx}")
            session = _Session(session_rng, spans, turns, stream)
            stream += 2 * turns
            yield self._turn(session, idx, 0, now_s)
            if turns > 1:
                self._sessions[idx] = session
            idx += 1

    def follow_up(self, ended: SimulatedRequest, now_s: float) -> SimulatedRequest | None:
        """Return the next turn of a session."""
        key = ended.session
        session = None if key is None else self._sessions.get(key)
        if key is None or session is None:
            return None
        session.spans = (*ended.prompt, ended.output)
        room = self.shape.max_context - num_tokens(session.spans)
        if not session.left or room < 2:
            del self._sessions[key]
            return None
        pause_s = session.rng.expovariate(1 / self.shape.think_s) if self.shape.think_s else 0.0
        return self._turn(session, key, ended.turn + 1, now_s + pause_s)

    def _turn(self, session: _Session, key: int, turn: int, arrival_s: float) -> SimulatedRequest:
        shape, rng, stream = self.shape, session.rng, session.next_stream
        session.next_stream += 2
        session.left -= 1
        room = shape.max_context - num_tokens(session.spans)
        wanted_input = _length(rng, shape.input_len, shape.input_sigma)
        wanted_new = _length(rng, shape.output_len, shape.output_sigma)
        num_input = min(wanted_input, room - 1)
        num_new = min(wanted_new, room - num_input)
        self.num_shortened += (num_input, num_new) != (wanted_input, wanted_new)
        prompt = (*session.spans, TokenSpan(stream, 0, num_input))
        return SimulatedRequest(arrival_s, prompt, num_new, stream + 1, session=key, turn=turn)

    def _gap_s(self, rng: random.Random) -> float:
        """Return the seconds from one arrival of a session to the next."""
        shape = self.shape
        mean_s = shape.turns / shape.rate
        if shape.burstiness == 0:
            return mean_s
        if shape.burstiness == 1:
            return rng.expovariate(1 / mean_s)
        return rng.gammavariate(shape.burstiness**-2, mean_s * shape.burstiness**2)

    def _turns(self, rng: random.Random) -> int:
        """Return the number of turns of a session."""
        mean = self.shape.turns
        if mean == 1 or self.shape.fixed_turns:
            return round(mean)
        # Geometric from 1 on: each turn is followed by another one with probability 1 - 1 / mean.
        return min(MAX_TURNS, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)))


def _length(rng: random.Random, mean: int, sigma: float) -> int:
    """Return a length of at least 1."""
    if not sigma:
        return mean
    return max(1, min(MAX_LENGTH, round(mean * math.exp(rng.gauss(-(sigma**2) / 2, sigma)))))
