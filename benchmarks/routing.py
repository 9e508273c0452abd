"""Routers before several replicas: `python -m benchmarks.routing [--served]`.

The same conversations (200 sessions of 6 turns, and sessions of agents with a median of 43 turns) go through round
robin, through a tree of the prompts that were sent, and through Quire's router, which follows KV events; and, for the
hit rate, through one replica whose cache is as large as all four together.

Without `--served`, the replicas are simulated: the real scheduler and memory, steps of a modelled duration, and a data
plane that draws a fixed token. The figures are then the same on every machine. With `--served`, they are servers of the
bundled model on this machine behind `quire route`, with the policy `round_robin` for turns, and times are measured at a
client. For the tree of prompts, the client sends to the servers directly. A quiet machine is needed for that.

`--trace NAME` and `--router NAME`, each also several times, run a part; a part has a file of its own under results/.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import machine
from benchmarks.routing_traces import (
    Chooser,
    EventRouter,
    PromptTree,
    RoundRobinChooser,
    Session,
    TraceShape,
    agent_shape,
    chat_shape,
    make_trace,
)
from quire.fleet.routing.router import RouterConfig
from quire.measurement.simulation.replicas.executor import CountingExecutor
from quire.memory.kv_events import KVEventCollector
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request

NUM_REPLICAS, BLOCK_SIZE, VOCAB = 4, 16, 30_000
# Blocks of one replica, token budget of a step, and running sequences.
NUM_BLOCKS, BUDGET, MAX_NUM_SEQS = 1400, 512, 64
# Times of a step, of the order of a small model on a CPU: overhead, a token of a prompt, a decoded token.
STEP_S, PREFILL_S, DECODE_S = 0.004, 0.0008, 0.0015
SEED = 7
# Short name -> title of the trace; names of the routers, the last of which has one replica.
TITLES = {"chat": "chat, 6 turns", "agents": "agents, median of 43 turns"}
BIG = "one big cache"
ROUTERS = ("round robin", "prompt tree", "quire", BIG)


class Figures(NamedTuple):
    """The result of a trace and a router.

    Args:
        hit_share: tokens of prompts that were hit, as a share of all.
        mean_ttft_s: mean time to the first token.
        p99_ttft_s: 99th percentile of it.
        balance: computed tokens of the most loaded replica, in units of the mean.
        num_requests: number of requests.
    """

    hit_share: float
    mean_ttft_s: float
    p99_ttft_s: float
    balance: float
    num_requests: int


class SimulatedTurn:
    """A turn on its way.

    Args:
        session: name of the session.
        sent_s: time at which it was sent.
        replica: replica that it was sent to.
        request: its request.
    """

    def __init__(self, session: str, sent_s: float, replica: int, request: Request) -> None:
        self.session, self.sent_s, self.replica, self.request = session, sent_s, replica, request
        self.has_begun = False


class SimulatedReplica:
    """A replica whose steps take a modelled time.

    Args:
        num_blocks: blocks of its cache.
        speed: factor by which it is faster.
    """

    def __init__(self, num_blocks: int, speed: float = 1.0) -> None:
        memory = KVCacheManager([FullAttention(block_size=BLOCK_SIZE)], num_blocks, watermark=num_blocks // 100)
        self.scheduler = Scheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
        self.collector = KVEventCollector(memory)
        self.turns: dict[str, SimulatedTurn] = {}
        self.num_computed = 0
        self.is_stepping = False
        self._executor = CountingExecutor()
        self._speed = speed

    def step(self) -> tuple[float, Callable[[], list[SimulatedTurn]]]:
        """Run a step; return its duration, and a function that returns the turns that drew a token."""
        plan = self.scheduler.plan(0)
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        num_prompt = sum(len(item.token_ids) for item in plan.items if len(item.token_ids) > 1)
        self.num_computed += num_prompt
        duration_s = STEP_S + num_prompt * PREFILL_S + (num_tokens - num_prompt) * DECODE_S
        drawing = [item.seq_id for item in plan.items if item.num_samples]
        names = [self.scheduler.sequences[seq_id].request.request_id for seq_id in drawing]

        def finish() -> list[SimulatedTurn]:
            self.scheduler.update_from_results(plan.items, self._executor.execute(plan).items)
            return [self.turns[name] for name in names]

        return duration_s / self._speed, finish


def simulate(sessions: Sequence[Session], chooser: Chooser, replicas: Sequence[SimulatedReplica]) -> Figures:
    """Serve a trace; all events are handled in the order of their times, and of their making where those are equal."""
    pending: list[tuple[float, int, Callable[[float], None]]] = []
    contexts = [[*session.system] for session in sessions]
    ttfts: list[float] = []
    num_prompt = num_hit = num_made = 0

    def at(time_s: float, act: Callable[[float], None]) -> None:
        nonlocal num_made
        num_made += 1
        heapq.heappush(pending, (time_s, num_made, act))

    def send(number: int, turn: int, now_s: float) -> None:
        nonlocal num_prompt
        session, tokens = sessions[number], contexts[number]
        tokens += session.turns[turn]
        replica = chooser.choose(tokens, str(number), now_s)
        params = SamplingParams(max_tokens=session.num_outputs[turn], ignore_eos=True, detokenize=False)
        name = f"{number}.{turn}"
        limit = len(tokens) + session.num_outputs[turn]
        request = Request(name, tokens.copy(), params, limit, frozenset(), num_made, seed=0)
        replicas[replica].turns[name] = SimulatedTurn(str(number), now_s, replica, request)
        replicas[replica].scheduler.add(request)
        num_prompt += len(tokens)
        start(replica, now_s)

    def start(replica: int, now_s: float) -> None:
        if not replicas[replica].is_stepping and replicas[replica].scheduler.has_unfinished:
            replicas[replica].is_stepping = True
            duration_s, finish = replicas[replica].step()
            at(now_s + duration_s, lambda end_s: end(replica, finish, end_s))

    def end(replica: int, finish: Callable[[], list[SimulatedTurn]], now_s: float) -> None:
        nonlocal num_hit
        for turn in finish():
            if not turn.has_begun:
                turn.has_begun = True
                ttfts.append(now_s - turn.sent_s)
                chooser.on_first_token(replica, turn.session, now_s)
            if turn.request.request_id not in replicas[replica].scheduler.requests:
                number, _, idx = turn.request.request_id.partition(".")
                account = turn.request.account
                assert account is not None
                num_hit += turn.request.num_prompt - account.sources.computed
                chooser.on_end(replica, turn.session)
                del replicas[replica].turns[turn.request.request_id]
                follow(int(number), int(idx), now_s)
        events = replicas[replica].collector.take_events()
        if events:
            chooser.on_events(replica, events)
        replicas[replica].is_stepping = False
        start(replica, now_s)

    def follow(number: int, turn: int, now_s: float) -> None:
        session = sessions[number]
        contexts[number] += [1] * session.num_outputs[turn]
        if turn + 1 < len(session.turns):
            at(now_s + session.pauses_s[turn], lambda then_s: send(number, turn + 1, then_s))

    for number, session in enumerate(sessions):
        at(session.start_s, lambda now_s, number=number: send(number, 0, now_s))  # type: ignore[misc]
    while pending:
        now_s, _, act = heapq.heappop(pending)
        act(now_s)
    return figures_of(num_hit / num_prompt, ttfts, [replica.num_computed for replica in replicas])


def figures_of(hit_share: float, ttfts: Sequence[float], computed: Sequence[int]) -> Figures:
    """Return the figures of a run."""
    balance = max(computed) / statistics.mean(computed)
    ordered = sorted(ttfts)
    p99_s = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Figures(hit_share, statistics.mean(ttfts), p99_s, balance, len(ttfts))


def shapes(num_sessions: int, rate: float = 4.0) -> dict[str, TraceShape]:
    """Return the traces by title, with a rate of chats a second."""
    return {
        TITLES["chat"]: chat_shape(num_sessions, rate=rate, pause_s=4.0),
        TITLES["agents"]: agent_shape(num_sessions // 2, rate=rate / 4, pause_s=0.5),
    }


def run_simulated(shape: TraceShape, seed: int = SEED, routers: Sequence[str] = ROUTERS) -> dict[str, Figures]:
    """Return the figures of some routers over simulated replicas, by name."""
    sessions = make_trace(shape, VOCAB, seed)
    config = RouterConfig(seconds_per_token=PREFILL_S, stream_tokens=round(DECODE_S / PREFILL_S * 4))
    choosers: dict[str, Chooser] = {
        "round robin": RoundRobinChooser(NUM_REPLICAS),
        "prompt tree": PromptTree(NUM_REPLICAS),
        "quire": EventRouter(NUM_REPLICAS, BLOCK_SIZE, config),
    }
    found = {
        name: simulate(sessions, chooser, [SimulatedReplica(NUM_BLOCKS) for _ in range(NUM_REPLICAS)])
        for name, chooser in choosers.items()
        if name in routers
    }
    if BIG in routers:
        # As fast as all four, so that the turns come in much the same order.
        big = SimulatedReplica(NUM_REPLICAS * NUM_BLOCKS, speed=NUM_REPLICAS)
        found[BIG] = simulate(sessions, RoundRobinChooser(1), [big])
    return found


def show(title: str, found: dict[str, Figures]) -> None:
    """Print a table, and what the marks are about."""
    print(f"\n{title}")
    print(f"{'':16}{'hit share':>11}{'mean TTFT':>12}{'p99 TTFT':>12}{'max load':>10}{'requests':>10}")
    for name, each in found.items():
        times = f"{1e3 * each.mean_ttft_s:>9.1f} ms{1e3 * each.p99_ttft_s:>9.1f} ms"
        print(f"{name:16}{each.hit_share:>11.4f}{times}{each.balance:>10.2f}{each.num_requests:>10}")
    quire = found.get("quire")
    if quire is None:
        return
    for other in ("round robin", "prompt tree"):
        if other in found:
            print(f"mean TTFT is {quire.mean_ttft_s / found[other].mean_ttft_s:.2f} of that of {other}")
    if BIG in found:
        behind = 100 * (found[BIG].hit_share - quire.hit_share)
        print(f"hit share: {behind:.1f} points behind one big cache")
    print(f"the most loaded replica has {quire.balance:.2f} times the mean load")


def main() -> None:
    """Run all traces, print tables and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--served", action="store_true", help="measure servers of the bundled model on this machine")
    parser.add_argument("--sessions", type=int, default=200, help="sessions of the chat trace")
    parser.add_argument("--rate", type=float, default=4.0, help="sessions a second of the chat trace")
    parser.add_argument("--name", default=None, help="the name of the file under results/")
    parser.add_argument("--trace", action="append", choices=TITLES, help="this trace only")
    parser.add_argument("--router", action="append", choices=ROUTERS, help="this router only")
    options = parser.parse_args()
    rows = []
    for short in options.trace or TITLES:
        title = TITLES[short]
        shape, routers = shapes(options.sessions, options.rate)[title], options.router or ROUTERS
        if options.served:
            from benchmarks.routing_served import run_served

            found = run_served(shape, routers=routers)
        else:
            found = run_simulated(shape, routers=routers)
        show(title, found)
        rows.append({"trace": title, "runs": {name: each._asdict() for name, each in found.items()}})
    part = [*(options.trace or ()), *(name.replace(" ", "_") for name in options.router or ())]
    name = options.name or "-".join(["routing_served" if options.served else "routing", *part])
    print(machine.save(name, {"num_replicas": NUM_REPLICAS, "rate": options.rate, "rows": rows}))


if __name__ == "__main__":
    main()
