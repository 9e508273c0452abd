"""The first grammar of a server beside running streams: `python -m benchmarks.first_grammar MODEL`.

Streams run in the engine of a model with a large vocabulary. Then two requests with new grammars come, one after the
other; the first makes the processes of grammars start, which read the vocabulary. Printed are the pauses between two
tokens of a stream, before the grammars and while they are answered, and the time to their own first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

from benchmarks import machine
from quire import AsyncLLM, SamplingParams
from quire.sequences.structured import StructuredOutputs

NUM_STREAMS = 4
SETTLING_S = 2.0


class Streams:
    """Requests that run until `stop`.

    Attributes:
        pauses: time of each token, and seconds since the one before it in its stream.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.pauses: list[tuple[float, float]] = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run(llm, seed)) for seed in range(NUM_STREAMS)]

    async def _run(self, llm: AsyncLLM, seed: int) -> None:
        params, last = SamplingParams(max_tokens=None, ignore_eos=True, temperature=1.0, seed=seed), None
        async for _ in llm.generate([5 + seed, 6, 7, 8], params):
            now = time.perf_counter()
            if last is not None:
                self.pauses.append((now, now - last))
            last = now
            if self._is_over:
                return

    async def stop(self) -> None:
        """End all requests."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def first_token_s(llm: AsyncLLM, longest: int) -> float:
    """Return the time to the first token of a request with a new grammar, whose answer is awaited."""
    properties = {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": longest}}
    form = StructuredOutputs(json={"type": "object", "properties": properties, "required": ["a", "b"]})
    started_s, first_s = time.perf_counter(), None
    async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=40, seed=1, structured_outputs=form)):
        first_s = first_s or time.perf_counter() - started_s
    assert first_s is not None
    return first_s


async def measure(model: str, threads: int) -> dict[str, Any]:
    """Return the seconds that were measured."""
    llm = AsyncLLM.from_options(model, num_threads=threads, max_num_seqs=16)
    async with llm:
        gc.collect()
        gc.freeze()  # as a server does
        streams = Streams(llm)
        await asyncio.sleep(SETTLING_S)
        begun_s = time.perf_counter()
        first_tokens = [await first_token_s(llm, longest) for longest in (5, 6)]
        await streams.stop()
    before = [pause for now, pause in streams.pauses if now < begun_s]
    beside = [pause for now, pause in streams.pauses if now >= begun_s]
    return {
        "before": {"median_s": statistics.median(before), "longest_s": max(before)},
        "beside": {"median_s": statistics.median(beside), "longest_s": max(beside)},
        "first_token_s": first_tokens,
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="first_grammar", help="name of the file of results")
    options = parser.parse_args()
    found = asyncio.run(measure(options.model, options.threads))
    for name in ("before", "beside"):
        median_ms, longest_ms = (1e3 * found[name][key] for key in ("median_s", "longest_s"))
        print(f"{name} the grammars: {median_ms:.1f} ms between tokens, {longest_ms:.0f} ms at most")
    first, second = found["first_token_s"]
    print(f"first token of the first grammar after {first:.2f} s, of another one after {second:.2f} s")
    print(machine.save(options.name, {"model": options.model.rpartition("/")[2], "threads": options.threads, **found}))


if __name__ == "__main__":
    main()
