"""The served form of `benchmarks.routing`: servers of the bundled model in processes of their own, and a client."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from benchmarks.routing import BIG, NUM_REPLICAS, ROUTERS, SEED, Figures, figures_of
from benchmarks.routing_traces import PromptTree, Session, TraceShape, make_trace
from quire.fleet.local_fleet import EVENTS

NUM_BLOCKS = 700
PATIENCE_S = 600.0
# Routers that are policies of `quire route`, so that the way is the same; a tree of prompts is at the client.
POLICIES = {"round robin": "round_robin", "quire": "cache_aware"}
# The figures of a router: from which server, and how long it took.
Place = Callable[[list[int], str], str]


def run_served(
    shape: TraceShape, num_replicas: int = NUM_REPLICAS, routers: Sequence[str] = ROUTERS
) -> dict[str, Figures]:
    """Return the figures of some routers over servers on this machine, by name."""
    return asyncio.run(_run(shape, num_replicas, routers))


async def _run(shape: TraceShape, num_replicas: int, routers: Sequence[str]) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    several = [name for name in routers if name != BIG]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        if several:
            async with AsyncExitStack() as stack:
                size = ("--num-kv-blocks", str(NUM_BLOCKS), "--kv-events-config", json.dumps(EVENTS))
                servers = [_quire("serve", "--num-threads", "1", *size) for _ in range(num_replicas)]
                urls = [await stack.enter_async_context(server) for server in servers]
                sessions = await trace_for(http, urls[0], shape)
                for name in several:
                    for url in urls:
                        await http.post(f"{url}/reset_prefix_cache", json={})
                    if name in POLICIES:
                        async with _quire("route", "--to", ",".join(urls), "--policy", POLICIES[name]) as url:
                            found[name] = await serve_trace(http, sessions, _always(url), num_replicas)
                    else:
                        place = _direct(PromptTree(num_replicas), urls)
                        found[name] = await serve_trace(http, sessions, place, num_replicas)
        if BIG in routers:
            blocks = str(num_replicas * NUM_BLOCKS)
            async with _quire("serve", "--num-threads", "1", "--num-kv-blocks", blocks) as url:
                found[BIG] = await serve_trace(http, await trace_for(http, url, shape), _always(url), 1)
    return found


def _direct(chooser: PromptTree, urls: Sequence[str]) -> Place:
    """Return a router at the client, which sends to the servers directly."""
    return lambda tokens, session: urls[chooser.choose(tokens, session, 0.0)]


def _always(url: str) -> Place:
    return lambda *_: url


@asynccontextmanager
async def _quire(command: str, *flags: str) -> AsyncIterator[str]:
    """Start a process, and yield its address."""
    start = [sys.executable, "-m", "quire", command, "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = await asyncio.to_thread(process.stdout.readline)
        match = re.search(r" at (http://\S+)", said)
        assert match, f"it said {said!r}"
        yield match[1]
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


async def trace_for(http: httpx.AsyncClient, url: str, shape: TraceShape) -> list[Session]:
    """Return a trace that fits the model."""
    info = (await http.get(f"{url}/tokenizer_info")).json()
    longest = min(shape.max_tokens, int(info["model_max_length"]) - 8)
    return make_trace(shape._replace(max_tokens=longest), int(info["vocab_size"]), SEED)


async def serve_trace(http: httpx.AsyncClient, sessions: Sequence[Session], place: Place, num_replicas: int) -> Figures:
    """Serve a trace and return its figures."""
    ttfts: list[float] = []
    computed: dict[str, int] = {}
    counts = {"prompt": 0, "hit": 0}
    begin_s = time.perf_counter()

    async def run(number: int, session: Session) -> None:
        tokens = [*session.system]
        await asyncio.sleep(max(0.0, session.start_s - (time.perf_counter() - begin_s)))
        for turn, new in enumerate(session.turns):
            tokens += new
            body = {
                "prompt": tokens,
                "max_tokens": session.num_outputs[turn],
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            }
            base, started_s, is_first = place(tokens, str(number)), time.perf_counter(), True
            output: list[int] = []
            headers = {"x-session-id": str(number)}
            async with http.stream("POST", f"{base}/v1/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                server = response.headers.get("x-quire-replica", base)
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if is_first:
                        ttfts.append(time.perf_counter() - started_s)
                        is_first = False
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        output += choice.get("token_ids") or ()
                    if chunk.get("usage"):
                        details = chunk["usage"].get("prompt_tokens_details") or {}
                        num_hit = int(details.get("cached_tokens") or 0)
                        counts["prompt"] += len(tokens)
                        counts["hit"] += num_hit
                        computed[server] = computed.get(server, 0) + len(tokens) - num_hit
            assert len(output) == session.num_outputs[turn], f"{len(output)} tokens came"
            tokens += output
            await asyncio.sleep(session.pauses_s[turn])

    await asyncio.gather(*(run(number, session) for number, session in enumerate(sessions)))
    return figures_of(
        counts["hit"] / counts["prompt"], ttfts, [*computed.values(), *[0] * (num_replicas - len(computed))]
    )
