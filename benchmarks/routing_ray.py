"""The form of `benchmarks.routing` on Ray Serve: the same application with Quire's router and with Ray's own.

`python -m benchmarks.routing_ray` needs an environment with ray (`pip install 'quire[ray]'`). Each run is an
application of its own, started as a user starts it, `serve run FILE`. Ray's `PrefixCacheAffinityRouter` gets each
prompt as a text of one character a token, so that it compares what Quire's router compares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.routing import NUM_REPLICAS, Figures, shapes, show
from benchmarks.routing_served import NUM_BLOCKS, PATIENCE_S, serve_trace, trace_for
from benchmarks.routing_traces import TraceShape

# The public name of Ray's router of prefixes, in `ray.serve.llm`, can be imported with vLLM only; it adds nothing to
# this class.
PREFIX_AWARE = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
ROUTERS = {
    "quire": "quire.fleet.ray.request_router.CacheAwareRouter",
    "ray, prefixes": PREFIX_AWARE,
    "ray, default": "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
}
START_S = 300.0


@asynccontextmanager
async def application(**options: Any) -> AsyncIterator[str]:
    """Start an application, and yield its address."""
    port = machine.free_port()
    fixed = {"num_cpus": 0, "num_threads": 1, "log_interval_s": 0}
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "quire",
                "route_prefix": "/",
                "import_path": "quire.fleet.ray:app",
                "args": {**fixed, **options},
            }
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "app.json", Path(folder) / "log"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "serve"), "run", str(path)]
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        url = f"http://127.0.0.1:{port}"
        try:
            await _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 120)


async def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the application answers."""
    deadline_s = time.monotonic() + START_S
    async with httpx.AsyncClient(timeout=10) as http:
        while True:
            try:
                if (await http.get(f"{url}/tokenizer_info")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the application does not start:\n{log.read_text()[-4000:]}")
            await asyncio.sleep(0.5)


async def run(shape: TraceShape, names: list[str]) -> dict[str, Figures]:
    """Return the figures of each router, and of one replica with as large a cache as all together."""
    found: dict[str, Figures] = {}
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http:
        for name in [*names, "one big cache"]:
            count = 1 if name == "one big cache" else NUM_REPLICAS
            router = ROUTERS.get(name, ROUTERS["quire"])
            blocks = NUM_BLOCKS * NUM_REPLICAS // count
            async with application(num_replicas=count, num_kv_blocks=blocks, request_router=router) as url:
                sessions = await trace_for(http, url, shape)
                started_s = time.perf_counter()
                found[name] = await serve_trace(http, sessions, lambda *_, url=url: url, count)
                print(f"{name}: {found[name]} in {time.perf_counter() - started_s:.0f} s", flush=True)
    return found


def main() -> None:
    """Run a trace, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200, help="sessions of the chat trace")
    parser.add_argument("--rate", type=float, default=4.0, help="sessions a second of the chat trace")
    parser.add_argument("--trace", choices=("chat", "agents"), default="chat")
    parser.add_argument("--beside", nargs="+", choices=[*ROUTERS][1:], default=["ray, prefixes"], help="Ray's routers")
    options = parser.parse_args()
    title, shape = next(
        each for each in shapes(options.sessions, options.rate).items() if each[0].startswith(options.trace)
    )
    found = asyncio.run(run(shape, ["quire", *options.beside]))
    show(title, found)
    for other in options.beside:
        print(f"mean TTFT is {found['quire'].mean_ttft_s / found[other].mean_ttft_s:.2f} of that of {other}")
    rows = [{"trace": title, "runs": {name: each._asdict() for name, each in found.items()}}]
    print(machine.save("routing_ray", {"num_replicas": NUM_REPLICAS, "rate": options.rate, "rows": rows}))


if __name__ == "__main__":
    main()
