"""Traces of conversations for `benchmarks.routing`, and the routers that are compared.

A session begins at a time of its own; each turn's prompt is the session so far, with the answers that it was given, and
some new tokens; the next turn begins a while after the answer. All sessions of an application begin with the same
system prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.fleet.routing.router import Route, Router, RouterConfig, RouteRequest
from quire.memory.kv_events import KVEvent


class Session(NamedTuple):
    """One conversation.

    Args:
        start_s: time of its first turn.
        system: tokens that all sessions of its application begin with.
        turns: new tokens of each turn.
        num_outputs: tokens of each answer.
        pauses_s: time between an answer and the next turn.
    """

    start_s: float
    system: list[int]
    turns: list[list[int]]
    num_outputs: list[int]
    pauses_s: list[float]


class TraceShape(NamedTuple):
    """The sizes of a trace.

    Args:
        num_sessions: number of sessions.
        num_turns: function that draws a session's number of turns.
        rate: sessions a second.
        num_systems: number of different system prompts.
        system_tokens: length of a system prompt.
        user_tokens: mean of the new tokens of a turn.
        output_tokens: mean of the tokens of an answer.
        pause_s: mean of the time between turns.
        max_tokens: greatest length of a session.
    """

    num_sessions: int
    num_turns: Callable[[random.Random], int]
    rate: float
    num_systems: int = 4
    system_tokens: int = 96
    user_tokens: int = 48
    output_tokens: int = 24
    pause_s: float = 4.0
    max_tokens: int = 1900


def chat_shape(num_sessions: int, rate: float, pause_s: float) -> TraceShape:
    """Return the shape of conversations of six turns."""
    return TraceShape(num_sessions, lambda _: 6, rate, pause_s=pause_s)


def agent_shape(num_sessions: int, rate: float, pause_s: float) -> TraceShape:
    """Return the shape of agents' sessions, whose numbers of turns have the median 43, and a long tail."""

    def num_turns(rng: random.Random) -> int:
        return max(2, min(120, round(43 * rng.lognormvariate(0.0, 0.6))))

    return TraceShape(num_sessions, num_turns, rate, user_tokens=16, output_tokens=8, pause_s=pause_s)


def make_trace(shape: TraceShape, vocab_size: int, seed: int) -> list[Session]:
    """Return the sessions of a trace, by their starts."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocab_size) for _ in range(count)]

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(0.5, 1.5)))

    systems = [tokens(shape.system_tokens) for _ in range(shape.num_systems)]
    sessions, now_s = [], 0.0
    for _ in range(shape.num_sessions):
        now_s += rng.expovariate(shape.rate)
        system, turns, outputs = rng.choice(systems), list[list[int]](), list[int]()
        length = len(system)
        for _ in range(shape.num_turns(rng)):
            new, num_output = around(shape.user_tokens), around(shape.output_tokens)
            length += new + num_output
            if length > shape.max_tokens:
                break
            turns.append(tokens(new))
            outputs.append(num_output)
        pauses = [rng.expovariate(1 / shape.pause_s) for _ in turns]
        sessions.append(Session(now_s, system, turns, outputs, pauses))
    return sessions


class Chooser(Protocol):
    """A router under test, which chooses a replica by its number."""

    def choose(self, tokens: Sequence[int], session: str, now_s: float) -> int:
        """Return the replica of a request."""

    def on_first_token(self, replica: int, session: str, now_s: float) -> None:
        """Record that the answer has begun."""

    def on_end(self, replica: int, session: str) -> None:
        """Record that the answer has ended."""

    def on_events(self, replica: int, events: list[KVEvent]) -> None:
        """Record the events of a step."""


class RoundRobinChooser:
    """Takes the replicas in turn.

    Args:
        count: number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def choose(self, tokens: Sequence[int], session: str, now_s: float) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % self._count

    def on_first_token(self, replica: int, session: str, now_s: float) -> None: ...

    def on_end(self, replica: int, session: str) -> None: ...

    def on_events(self, replica: int, events: list[KVEvent]) -> None: ...


class PromptTree(RoundRobinChooser):
    """Routes by the longest prompt that a replica was sent before, as routers without events do.

    It knows neither answers nor evictions. Without a match of at least a tenth, the replica that was sent the fewest
    tokens gets the prompt.

    Args:
        count: number of replicas.
    """

    MIN_MATCH = 0.1
    STRIDE = 8

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._known: list[set[int]] = [set() for _ in range(count)]
        self._num_sent = [0] * count

    def choose(self, tokens: Sequence[int], session: str, now_s: float) -> int:  # noqa: ARG002
        names, name = [], 0
        for start in range(0, len(tokens) - len(tokens) % self.STRIDE, self.STRIDE):
            name = hash((name, *tokens[start : start + self.STRIDE]))
            names.append(name)
        matches = [
            next((idx for idx, each in enumerate(names) if each not in known), len(names)) for known in self._known
        ]
        best = max(range(self._count), key=lambda replica: matches[replica])
        if matches[best] * self.STRIDE < self.MIN_MATCH * len(tokens):
            best = min(range(self._count), key=lambda replica: self._num_sent[replica])
        self._num_sent[best] += len(tokens) - matches[best] * self.STRIDE
        self._known[best].update(names)
        return best


class EventRouter:
    """Quire's router, with the events of every replica.

    Args:
        count: number of replicas.
        block_size: tokens of a block.
        config: constants of the score.
    """

    def __init__(self, count: int, block_size: int, config: RouterConfig) -> None:
        self.router = Router(config)
        for replica in range(count):
            self.router.add_replica(str(replica), block_size)
        self._routes: dict[str, Route] = {}

    def choose(self, tokens: Sequence[int], session: str, now_s: float) -> int:
        route = self.router.route(RouteRequest(tokens, session=session), now_s)
        assert route is not None
        self._routes[session] = route
        return int(route.replica)

    def on_first_token(self, replica: int, session: str, now_s: float) -> None:  # noqa: ARG002
        self.router.on_first_token(self._routes[session], now_s)

    def on_end(self, replica: int, session: str) -> None:  # noqa: ARG002
        self.router.end(self._routes.pop(session))

    def on_events(self, replica: int, events: list[KVEvent]) -> None:
        name = str(replica)
        self.router.apply(name, self.router.feeds[name].next_seq, events)
