"""The router: it sends each request to the replica that is expected to begin with it first.

```
 score of a replica = seconds of computing that its cache saves + value of keeping them - seconds of its queue
                      - a part of its recent computing beyond the other replicas'
```

Other policies are `round_robin` and `least_loaded`, which ignore prompts. The router knows all parts of the score: KV
events state the contents of a cache, and the router itself has sent the queued and computed requests. A session's next
prompt is expected to hit its last prompt before the events say so. If events are missing, the cache counts as empty, so
the shortest queue decides. A request is in a queue from the moment of the choice until its end, and its prompt until
the first token; a prompt of unknown length counts as an average one. The same calls result in the same decisions,
because times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import ConfigError, shown
from quire.fleet.routing.feed import EventFeed, FeedState, FeedStep
from quire.fleet.routing.loads import LoadOrder, ReplicaLoad, Speed
from quire.fleet.routing.sessions import Sessions
from quire.fleet.routing.shadow_tree import NO_HIT, Hit, Scope, ShadowNode, ShadowTree
from quire.memory.kv_events import AllBlocksCleared, KVEvent, encode
from quire.memory.prefix.token_chain import TOKEN_BYTES

# Names as in SGLang's and vLLM's routers.
POLICIES = ("cache_aware", "least_loaded", "round_robin")
# Maximum numbers of replicas that are compared: of the longest hits, and of the shortest queues.
MAX_HOLDERS = 64
MAX_IDLE = 8
# Weight of the latest prompt in the mean tokens to compute.
MEAN_WEIGHT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The policy, and constants of its score.

    Args:
        policy: one of `POLICIES`.
        seconds_per_token: time to compute a token of a prompt, until it is measured.
        stream_tokens: delay of other requests by one that has not ended, in tokens of a prompt, beside its own prompt.
        unknown_tokens: tokens that count for a prompt of unknown length, until the mean of the known ones does.
        hit_weight: value of a hit token, in tokens to compute. The part above 1 is the value of a slot in a cache, on
            slow and fast replicas: a token that is not hit evicts another one, which may have to be computed again.
        balance_weight: cost of a token that a replica has recently computed more than others, in tokens to compute: new
            tokens in a busy cache evict tokens that will be requested, and sessions that begin there return.
        tie_tokens: difference of scores that count as equal, as the time of tokens of a prompt.
        max_sessions: number of sessions that are stored.
        session_s: time for which a session's last prompt is expected in a cache whose events are unknown.
        announce_s: time for which it is expected in a cache whose events are known; they arrive with the step.
    """

    policy: str = "cache_aware"
    seconds_per_token: float = 0.001
    stream_tokens: int = 16
    unknown_tokens: int = 256
    hit_weight: float = 2.0
    balance_weight: float = 0.05
    tie_tokens: int = 16
    max_sessions: int = 100_000
    session_s: float = 600.0
    announce_s: float = 5.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            allowed = ", ".join(POLICIES)
            raise ConfigError(f"policy must be one of {allowed}, got {shown(self.policy)}", field="policy")


class RouteRequest(NamedTuple):
    """The part of a request that determines its replica.

    Args:
        token_ids: tokens of the prompt; empty if they are unknown.
        scope: scope within which it shares blocks.
        session: name of its conversation; None without one.
    """

    token_ids: Sequence[int]
    scope: Scope = Scope()
    session: str | None = None


@dataclass(slots=True, eq=False)
class Route:
    """The replica for a request, with the reasons.

    Args:
        replica: name of the replica.
        hit: expected hit.
        score: score of the replica, in seconds.
        num_tokens: tokens of the prompt.
        is_by_session: True if the hit is expected because of the session's last request, not because of events.
    """

    replica: str
    hit: Hit
    score: float
    num_tokens: int
    is_by_session: bool = False
    _number: int = -1
    _pending: int = 0
    _ahead: int = 0
    _sent_s: float = 0.0
    _phase: int = 0  # 0: no answer yet, 1: a stream, 2: ended


class Router:
    """Chooses replicas for requests.

    Args:
        config: constants of the score.
    """

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.tree = ShadowTree()
        self.feeds: dict[str, EventFeed] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._speed = Speed(self.config.seconds_per_token)
        self._order = LoadOrder(self.config.stream_tokens, self._speed)
        self._sessions = Sessions(self.config.max_sessions)
        self._num_added = 0
        self._last_turn = -1
        # Mean tokens to compute of a prompt.
        self._mean_pending = float(self.config.unknown_tokens)

    # ---- replicas ----

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order in which they were added."""
        return list(self._numbers)

    def add_replica(self, name: str, block_size: int = 0) -> None:
        """Add a replica with an empty cache.

        Args:
            name: name of the replica, different from all others.
            block_size: tokens per block; 0 for the largest block size in its events.
        """
        if name in self._numbers:
            raise ValueError(f"replicas must have different names, got {name!r} twice")
        number = self._numbers[name] = self._num_added
        self._num_added += 1
        self._names[number] = name
        self.feeds[name] = EventFeed()
        self.tree.add_replica(number, block_size)
        self._order.loads[number] = ReplicaLoad()
        self._order.update(number)

    def remove_replica(self, name: str) -> None:
        """Remove a replica; the ends of its requests may be reported later."""
        number = self._numbers.pop(name)
        del self._names[number], self.feeds[name], self._order.loads[number]
        self.tree.remove_replica(number)
        self._sessions.forget(number)

    def set_available(self, name: str, is_available: bool) -> None:
        """Set whether a replica takes requests."""
        number = self._numbers[name]
        self._order.loads[number].is_available = is_available
        self._order.update(number)

    def set_others(self, name: str, num_tokens: int) -> None:
        """Set the tokens of prompts that requests of other routers add to a replica's queue."""
        number = self._numbers[name]
        self._order.loads[number].other_tokens = num_tokens
        self._order.update(number)

    def own_tokens(self, name: str) -> int:
        """Return the length of a replica's queue in tokens of prompts, for requests of this router only."""
        return self._order.own_tokens(self._numbers[name])

    def restart_replica(self, name: str) -> None:
        """Forget the blocks and sessions of a replica that was restarted."""
        number = self._numbers[name]
        self.feeds[name].reset()
        self.tree.clear(number)
        self._sessions.forget(number)

    def load_of(self, name: str) -> ReplicaLoad:
        """Return a replica's work, which must not be changed."""
        return self._order.loads[self._numbers[name]]

    def queue_s(self, name: str) -> float:
        """Return the seconds until a replica could begin with another prompt."""
        return self._order.queue_s(self._numbers[name])

    def num_blocks(self, name: str) -> int:
        """Return the number of different blocks in a replica's cache, as far as known."""
        return self.tree.num_blocks(self._numbers[name])

    # ---- events ----

    def apply(self, name: str, seq: int, events: Sequence[KVEvent], *, is_replay: bool = False) -> FeedState:
        """Apply a batch of a replica's events.

        Args:
            name: name of the replica.
            seq: number of the batch.
            events: its events.
            is_replay: True for a batch that was requested.

        Returns:
            The state of the feed; after `GAP`, request a replay from `feeds[name].next_seq`, or all blocks.
        """
        number, feed = self._numbers[name], self.feeds[name]
        step = feed.accept(seq, events, is_replay=is_replay)
        if step is FeedStep.RESTART:
            self.tree.apply(number, (AllBlocksCleared(),))
        if step is not FeedStep.IGNORE:
            self.tree.apply(number, events)
        return feed.state

    # ---- requests ----

    def route(self, request: RouteRequest, now_s: float, excluded: Iterable[str] = ()) -> Route | None:
        """Choose a replica for a request and count the request as its work, until `end`.

        Args:
            request: the request.
            now_s: current time in seconds, monotonic.
            excluded: names of replicas that must not be chosen.

        Returns:
            The route; None if no replica takes requests.
        """
        routes = self.rank(request, now_s, excluded)
        if not routes:
            return None
        self.begin(routes[0], request, now_s)
        return routes[0]

    def rank(self, request: RouteRequest, now_s: float, excluded: Iterable[str] = ()) -> list[Route]:
        """Return routes for a request, the best first; none of them counts as work before `begin`.

        Of many replicas, only the longest hits and the shortest queues are ranked. See `route`.
        """
        skipped = frozenset(self._numbers[name] for name in excluded if name in self._numbers)
        if self.config.policy != "cache_aware":
            return self._rank_by_policy(request, skipped)
        token_bytes = encode(request.token_ids)
        paths: dict[int, list[ShadowNode]] = {}
        routes: list[Route] = []
        token_s = self._speed.seconds_per_token
        expected = self._expected(request, token_bytes, now_s)
        candidates = self._candidates(token_bytes, request.scope, expected, skipped, paths)
        recent = [self._order.loads[number].recent_at(now_s) for number in candidates]
        least = min(recent, default=0.0)
        for number, num_recent in zip(candidates, recent, strict=True):
            hit, is_by_session = self._hit(number, paths, token_bytes, request.scope), False
            if expected is not None and number == expected[0] and expected[1].value > hit.value:
                hit, is_by_session = expected[1], True
            load = self._order.loads[number]
            # The cost is at most the hit's value, so that without hits, queues and speeds decide.
            excess = min(self.config.balance_weight * (num_recent - least), self.config.hit_weight * hit.value)
            kept_s = ((self.config.hit_weight - 1) * hit.value - excess) * token_s
            num_computed = len(request.token_ids) - hit.value + self._order.queue_tokens(number)
            # The time to compute the whole prompt is a constant, equal for all replicas.
            saved_s = (len(request.token_ids) - num_computed * load.slowness_at(now_s)) * token_s
            name = self._names[number]
            routes.append(Route(name, hit, saved_s + kept_s, len(request.token_ids), is_by_session, number))
        if not routes:
            return routes
        # Nearly equal scores keep the order of the candidates, the shortest queue first.
        least = max(route.score for route in routes) - self.config.tie_tokens * token_s
        return sorted(routes, key=lambda route: -min(route.score, least))

    def begin(self, route: Route, request: RouteRequest, now_s: float) -> None:
        """Count a request as work of a route's replica, until `end`."""
        load, self._last_turn = self._order.loads[route._number], route._number
        route._ahead, route._sent_s = load.pending_tokens, now_s
        if route.num_tokens:
            route._pending = max(0, route.num_tokens - route.hit.num_tokens)
            self._mean_pending += MEAN_WEIGHT * (route._pending - self._mean_pending)
        else:
            route._pending = round(self._mean_pending)
        load.give(route._pending, now_s)
        self._order.update(route._number)
        if request.session is not None:
            encoded = encode(request.token_ids)
            self._sessions.record(request.session, route._number, request.scope, encoded, now_s)

    def on_first_token(self, route: Route, now_s: float) -> None:
        """Record that a request's answer has begun."""
        load = self._order.loads.get(route._number)
        # A prompt of unknown length measures nothing, and counts to its end, so that the fewest requests decide.
        if route._phase == 0 and load is not None and route.num_tokens:
            load.pending_tokens -= route._pending
            self._measure(load, now_s - route._sent_s, route._ahead + route._pending, now_s)
            self._order.update(route._number)
        route._phase = max(route._phase, 1)

    def end(self, route: Route) -> None:
        """Record that a request has ended, complete or not; further calls do nothing."""
        load = self._order.loads.get(route._number)
        if load is not None and route._phase < 2:
            if route._phase == 0 or not route.num_tokens:
                load.pending_tokens -= route._pending
            load.num_running -= 1
            self._order.update(route._number)
        route._phase = 2

    # ---- parts ----

    def _rank_by_policy(self, request: RouteRequest, skipped: frozenset[int]) -> list[Route]:
        """Return routes for `round_robin` or `least_loaded`, without hits."""
        if self.config.policy == "least_loaded":
            numbers = self._order.least(MAX_IDLE, skipped)
        else:
            # The next replica is the one added after the replica of the last turn, cyclically.
            able = (number for number, load in self._order.loads.items() if load.is_available and number not in skipped)
            numbers = sorted(able, key=lambda number: (number <= self._last_turn, number))
        return [Route(self._names[number], NO_HIT, 0.0, len(request.token_ids), _number=number) for number in numbers]

    def _measure(self, load: ReplicaLoad, seconds: float, num_tokens: int, now_s: float) -> None:
        """Record the time to a request's first token; `num_tokens` includes the tokens queued before the request."""
        if num_tokens > 0 and seconds > 0:
            load.measure(seconds, self._speed.expected_s(num_tokens), now_s)
            self._speed.measure(seconds, num_tokens)

    def _candidates(
        self,
        token_bytes: bytes,
        scope: Scope,
        expected: tuple[int, Hit] | None,
        skipped: frozenset[int],
        paths: dict[int, list[ShadowNode]],
    ) -> list[int]:
        """Return the replicas to compare, the shortest queues first, so that they win ties."""
        order = self._order
        chosen = dict.fromkeys(order.least(MAX_IDLE, skipped))
        num_holders = 0
        for size in sorted({blocks.block_size for blocks in self.tree.replicas.values()}):
            paths[size] = self.tree.path(token_bytes, scope, size)
            for node in reversed(paths[size]):
                for number in node.holders:
                    if num_holders >= MAX_HOLDERS:
                        break
                    if number not in chosen and number not in skipped and order.loads[number].is_available:
                        chosen[number] = None
                        num_holders += 1
        if expected is not None and expected[0] not in skipped and order.loads[expected[0]].is_available:
            chosen.setdefault(expected[0])
        return list(chosen)

    def _hit(self, number: int, paths: dict[int, list[ShadowNode]], token_bytes: bytes, scope: Scope) -> Hit:
        """Return the hit of a prompt in a replica's cache; no hit unless all its events are known."""
        if not token_bytes or self.feeds[self._names[number]].state is not FeedState.SYNCED:
            return NO_HIT
        return self.tree.hit(number, paths[self.tree.replicas[number].block_size], token_bytes, scope)

    def _expected(self, request: RouteRequest, token_bytes: bytes, now_s: float) -> tuple[int, Hit] | None:
        """Return the replica of a session's last request, and the expected hit there; None if there is none."""
        if request.session is None:
            return None
        visit = self._sessions.find(request.session, request.scope, token_bytes)
        if visit is None:
            return None
        is_known = self.feeds[self._names[visit.replica]].state is FeedState.SYNCED
        if now_s - visit.at_s > (self.config.announce_s if is_known else self.config.session_s):
            return None
        num_tokens = min(visit.num_bytes, max(0, len(token_bytes) - TOKEN_BYTES)) // TOKEN_BYTES
        return visit.replica, Hit(num_tokens, float(num_tokens))
