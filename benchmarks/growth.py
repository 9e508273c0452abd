"""The growth of Quire's rates with batch and context, compared with the roofline: `python -m benchmarks.growth`.

A point is a batch of sequences of the same length in decode. The batches of a length follow each other, and a larger
one finds the prompts of the smaller in the prefix cache, so that each prompt is computed once; the first one's time is
the rate of prompts. The roofline is what bytes and operations allow at the bandwidth and the rate of products that are
probed before each length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, make_model
from benchmarks.serving import BLOCK_SIZE
from benchmarks.shapes import CheckpointShape
from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.measurement.bench.workloads import PLAIN_IDS

BATCHES = "1,2,4,8,16,32,64"
CONTEXTS = "128,512,2048,8192,16384"
STEP_TOKENS = 512  # the most prompt tokens that are computed together with decodes
NUM_STEPS = 16  # steps whose median is a point


def num_beside(batch: int, context: int) -> int:
    """Return the most tokens of a sequence until the others have started and all have decoded together."""
    return batch * context // (STEP_TOKENS - batch) + 2 * NUM_STEPS


def points(batches: list[int], contexts: list[int], num_kv_tokens: int) -> list[tuple[int, list[int]]]:
    """Return (context, batches) of those that the KV cache has room for."""
    fitting = [
        (context, [batch for batch in batches if batch * (context + num_beside(batch, context)) <= num_kv_tokens])
        for context in contexts
    ]
    return [(context, some) for context, some in fitting if some]


def decode(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Serve prompts until all have decoded for some steps together.

    Returns:
        The seconds until all had started, and the median seconds of a step of all.
    """
    num_new = num_beside(len(prompts), len(prompts[0]))
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    waiting = {str(idx) for idx in range(len(prompts))}
    started_s = time.perf_counter()
    for name, prompt in zip(sorted(waiting, key=int), prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while waiting:
        waiting -= {news.request_id for news in engine.step()}
    all_started_s = time.perf_counter() - started_s
    steps = []
    for _ in range(NUM_STEPS):
        started_s = time.perf_counter()
        num_news = len(engine.step())
        steps.append(time.perf_counter() - started_s)
        if num_news != len(prompts):
            raise RuntimeError(f"a step of {len(prompts)} sequences had news of {num_news}")
    for idx in range(len(prompts)):
        engine.abort_request(str(idx))
    return all_started_s, statistics.median(steps)


def roofline_tokens_per_s(bytes_: float, operations: float, num_tokens: int, probe: dict[str, float | None]) -> float:
    """Return the rate that memory and processors allow a step at most.

    Args:
        bytes_, operations: bytes and operations of the step.
        num_tokens: number of tokens that the step gives.
        probe: "gb_s" and "gflop_s"; what could not be probed bounds nothing.
    """
    needs = {"gb_s": bytes_ / 1e9, "gflop_s": operations / 1e9}
    seconds = [needs[name] / rate for name, rate in probe.items() if rate]
    return num_tokens / max(seconds) if seconds else float("inf")


def measure(
    engine: Engine, shape: CheckpointShape, context: int, batches: list[int], probe: machine.MachineProbe
) -> dict[str, Any]:
    """Return the rates of one length: of its prompt, and of decoding in each batch."""
    rng = random.Random(context)
    prompts = [[rng.choice(PLAIN_IDS) for _ in range(context)] for _ in range(max(batches))]
    now = {"gb_s": probe.read_gb_s(), "gflop_s": probe.gflop_s()}
    rows = []
    prompt_s = 0.0
    for batch in batches:
        all_started_s, step_s = decode(engine, prompts[:batch])
        prompt_s = prompt_s or all_started_s
        mean_context = context + NUM_STEPS / 2
        bytes_, operations = shape.step_bytes(mean_context, batch), shape.step_operations(mean_context, batch)
        limit = roofline_tokens_per_s(bytes_, operations, batch, now)
        rows.append({"batch": batch, "tokens_per_s": batch / step_s, "roofline_tokens_per_s": limit})
        print(f"{batch:3} x {context:5}: {batch / step_s:8.1f} tokens/s, at most {limit:8.1f}", flush=True)
    engine.reset_prefix_cache()
    # A prompt reads the weights once for each chunk, and half of its own length of KV for each token of a chunk.
    num_chunks = -(-context // STEP_TOKENS)
    least_bytes, operations = num_chunks * shape.step_bytes(context / 2), shape.prompt_operations(context)
    limit = roofline_tokens_per_s(least_bytes, operations, context, now)
    prompt_rate = batches[0] * context / prompt_s
    print(f"  1 x {context:5}: {prompt_rate:8.1f} prompt tokens/s, at most {limit:8.1f}", flush=True)
    prompt = {"tokens_per_s": prompt_rate, "roofline_tokens_per_s": limit}
    return {"context": context, "probe": now, "prompt": prompt, "decode": rows}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--contexts", default=CONTEXTS, help="prompt tokens")
    parser.add_argument("--kv-tokens", type=int, default=40960, help="of the cache; what does not fit is left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint folder; default: a random one")
    parser.add_argument("--shape", choices=make_model.SHAPES, default="qwen3-0.6b", help="of the random one")
    parser.add_argument("--name", default="growth", help="the name of the file under results/")
    options = parser.parse_args()
    model = make_model.ensure(options.shape) if options.model is None else options.model
    batches, contexts = ([int(value) for value in text.split(",")] for text in (options.batches, options.contexts))
    chosen = points(batches, contexts, options.kv_tokens)
    engine = LLM(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(context + num_beside(max(some), context) for context, some in chosen),
        block_size=BLOCK_SIZE,
        num_kv_blocks=options.kv_tokens // BLOCK_SIZE,
        max_num_seqs=max(batches),
        max_num_batched_tokens=STEP_TOKENS,
        num_threads=options.threads,
    ).engine
    probe, shape = machine.MachineProbe(options.threads), CheckpointShape.read(model)
    decode(engine, [[PLAIN_IDS[0]] * STEP_TOKENS])  # warms up
    engine.reset_prefix_cache()
    rows = [measure(engine, shape, context, some, probe) for context, some in chosen]
    settings = {"threads": options.threads, "dtype": "bfloat16", "model": model.name, "kv_tokens": options.kv_tokens}
    print(machine.save(options.name, {"settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
