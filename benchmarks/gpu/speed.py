"""Speed of attention alone, of whole model steps, and of an engine, as shares of the GPU's ceilings."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.captured import measure_captured, measure_drafts, measure_pieces
from benchmarks.gpu.memory import BLOCK_SIZE, KVMemory, make_batch, make_memory, num_blocks_of
from benchmarks.gpu.nano_vllm import LEAST, MOST, NUM_REQUESTS, TEMPERATURE, nano_requests
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_06B, REHEARSED, Shape, attention_flops, decode_floor, prompt_floor
from benchmarks.gpu.timing import Bench
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.ops.interface.ops import AttentionBatch, StepAttention
from quire.ops.triton.attention import step_attention
from quire.ops.triton.tiles import Tile, prefill_tile
from quire.ops.triton.triton_ops import TritonOps

BATCHES = (1, 8, 64, 256)
CONTEXTS = (128, 1024, 8192, 32768)
PROMPTS = (2048, 8192, 32768)
DRAFTS = 4
# Bytes of KV cache that measurements rotate through: more than the L2 cache of any GPU.
ROTATED = 1 << 28


def measure_attention(bench: Bench, ops: TritonOps) -> None:
    """Measure one layer of Llama-3.1-8B's shape: decodes by bandwidth, prompts by FLOPs, compared to torch's SDPA."""
    shape = REHEARSED if bench.is_rehearsal else LLAMA_8B
    kv_bytes = shape.kv_bytes // shape.num_layers
    for batch, context in [(b, c) for c in CONTEXTS for b in BATCHES] if not bench.is_rehearsal else [(2, 40)]:
        size = batch * context * kv_bytes
        copies = max(1, ROTATED // size) if not bench.is_rehearsal else 1
        if size * copies > bench.memory_left() or bench.left_s() < 60:
            continue
        spans = [(context - 1, 1)] * batch
        num_blocks = num_blocks_of(spans)
        memory = make_memory(copies * num_blocks, 1, shape.num_kv_heads, shape.head_dim, bench.device)
        steps = [
            ops.step_attention(make_batch(spans, bench.device, 1 + idx * (num_blocks - 1)), memory)
            for idx in range(copies)
        ]
        q = torch.randn(batch, shape.num_heads, shape.head_dim, device=bench.device, dtype=torch.bfloat16)

        overlapping = ops.device.overlapping
        kinds = {"": overlapping}
        if batch <= 8:  # what overlaps with the kernel before shows where few programs run
            kinds[", launches apart"] = {"OVERLAPS": False}
        for kind, launched in kinds.items():
            ops.device.overlapping = launched
            seconds = bench.device_seconds(partial(attend, steps, q), min(512, max(4, copies)))
            bench.add(
                f"decode attention, {batch} x {context}{kind}",
                us=seconds * 1e6,
                gb_per_s=size / seconds / 1e9,
                share=size / seconds / bench.rates.bytes_per_s,
            )
        ops.device.overlapping = overlapping
        del memory, steps
    measure_shared(bench, ops, shape)
    for length in PROMPTS if not bench.is_rehearsal else (40,):
        if bench.left_s() < 60:
            return
        spans = [(0, length)]
        memory = make_memory(num_blocks_of(spans), 1, shape.num_kv_heads, shape.head_dim, bench.device)
        batch_of_one = make_batch(spans, bench.device)
        step, in_turn = (ops.step_attention(batch_of_one, memory) for _ in range(2))
        q = torch.randn(length, shape.num_heads, shape.head_dim, device=bench.device, dtype=torch.bfloat16)
        for name, call in (
            ("", partial(attend, [step], q)),
            (", products in turn with softmaxes", partial(attend_in_turn, in_turn, q)),
            (", torch's", partial(attend_by_torch, q, shape)),
        ):
            seconds = bench.device_seconds(call, calls=2, repeats=5)
            rate = attention_flops(shape, length) / seconds
            bench.add(f"prompt attention, {length}{name}", ms=seconds * 1e3, tflops=rate / 1e12,
                      share=rate / bench.rates.flops_per_s)  # fmt: skip


def measure_shared(bench: Bench, ops: TritonOps, shape: Shape) -> None:
    """Measure decodes of sequences with a shared prefix: as they are served, and without sharing.

    Without sharing, many programs read the same blocks, and the share of L2 hits among these reads is not known.
    """
    batch, shared, behind = (64, 8192, 128) if not bench.is_rehearsal else (2, 256, 16)
    kv_bytes = shape.kv_bytes // shape.num_layers
    spans = [(shared + behind - 1, 1)] * batch
    if bench.left_s() < 60 or num_blocks_of(spans) * BLOCK_SIZE * kv_bytes > bench.memory_left():
        return
    memory = make_memory(num_blocks_of(spans), 1, shape.num_kv_heads, shape.head_dim, bench.device)
    q = torch.randn(batch, shape.num_heads, shape.head_dim, device=bench.device, dtype=torch.bfloat16)
    least, name = ops.device.launch_bytes, f"decode attention, {batch} x {shared + behind}, {shared} of them shared"
    for kind, launch_bytes in (("read once", least), ("read separately", float("inf"))):
        ops.device.launch_bytes = launch_bytes
        step = ops.step_attention(make_batch(spans, bench.device, shared=shared), memory)
        seconds = bench.device_seconds(partial(attend, [step], q), calls=4)
        least_s = (shared + batch * behind) * kv_bytes / bench.rates.bytes_per_s
        bench.add(f"{name}, {kind}", us=seconds * 1e6, share=least_s / seconds)
    ops.device.launch_bytes = least


def attend(steps: Sequence[StepAttention], q: Tensor, idx: int) -> Tensor:
    """Attend over the memory of one of several steps, in rotation."""
    return steps[idx % len(steps)].attend(0, q, 0.1)


def attend_in_turn(step: StepAttention, q: Tensor, idx: int) -> Tensor:
    """Attend by the kernel that is not pipelined (no overlap of PV and softmax); it is chosen at the first call."""

    def tile(*args: Any) -> Tile:
        return prefill_tile(*args)._replace(is_pipelined=False)

    with patch.object(step_attention, "prefill_tile", tile):
        return attend([step], q, idx)


def attend_by_torch(q: Tensor, shape: Shape, _idx: int) -> Tensor:
    """Attend to a prompt's own keys and values, which are not paged, by torch's SDPA."""
    heads = q.transpose(0, 1)[None]
    keys = heads[:, : shape.num_kv_heads]
    return scaled_dot_product_attention(heads, keys, keys, is_causal=True, scale=0.1, enable_gqa=True)


def make_decoder(shape: Shape, bench: Bench, ops: TritonOps) -> Decoder:
    """Make a model of random weights on the device; no file is written."""
    spec, _ = build(shape.config())
    decoder = Decoder(spec, ops=ops, dtype=torch.bfloat16, device=bench.device)
    load_random(decoder, bench)
    return decoder


def load_random(decoder: Decoder, bench: Bench) -> None:
    """Give a decoder random weights."""
    for name, size in decoder.weights.shapes().items():
        dtype = decoder.weights.dtype(name)
        decoder.weights.load(name, torch.randn(size, device=bench.device, dtype=dtype) * 0.02)


def measure_model(bench: Bench, ops: TritonOps, shape: Shape) -> None:
    """Measure whole steps: decodes at 1,024 tokens and steps with prompts, eager and captured; a prompt of 8,192.

    Logits are included, and for eager steps the argmax.
    """
    decoder = make_decoder(shape, bench, ops)
    context, prompt = (1024, 8192) if not bench.is_rehearsal else (20, 24)

    def step(spans: list[tuple[int, int]]) -> tuple[Callable[[int], Tensor], int]:
        memory = make_memory(num_blocks_of(spans), shape.num_layers, shape.num_kv_heads, shape.head_dim, bench.device)
        batch = make_batch(spans, bench.device)
        num_rows = batch.row_starts[-1]
        ids = torch.randint(0, shape.vocab_size, (num_rows,), device=bench.device)
        positions = torch.cat([torch.arange(history, history + rows) for history, rows in spans]).to(bench.device)
        ends = torch.tensor([end - 1 for end in batch.row_starts[1:]], device=bench.device)
        return lambda _idx: run_step(decoder, ids, positions, batch, memory, ends), num_rows

    for batch in BATCHES if not bench.is_rehearsal else (2,):
        needed = batch * context * shape.kv_bytes
        if needed > bench.memory_left() or bench.left_s() < 45:
            continue
        run, _ = step([(context - 1, 1)] * batch)
        seconds = bench.seconds(run)
        started = time.perf_counter()
        run(0)
        host_s = time.perf_counter() - started  # until all is launched: the host waits for nothing
        bench.add(
            f"{shape.name}, decode, {batch} x {context}",
            ms=seconds * 1e3,
            host_ms=host_s * 1e3,
            tokens_per_s=batch / seconds,
            share=decode_floor(shape, batch, context, bench.rates) / seconds,
        )
        del run  # a GPU may have no room for its cache beside that of the captured step
        if bench.left_s() > 45:
            measure_captured(bench, decoder, shape, batch, context)
    # A prompt together with decodes, as in most steps of a server, and one alone.
    for decodes, length in ((64, 192), (0, 2048)) if not bench.is_rehearsal else ((2, 20),):
        if bench.left_s() > 45:
            measure_pieces(bench, decoder, shape, decodes, context, length)
    drafts = ((1, DRAFTS), (1, 2 * DRAFTS + 1), (32, DRAFTS)) if not bench.is_rehearsal else ((2, DRAFTS),)
    for batch, num_drafts in drafts:
        if bench.left_s() > 45:
            measure_drafts(bench, decoder, shape, batch, context, num_drafts)
    if bench.left_s() > 45 and prompt * shape.kv_bytes < bench.memory_left():
        run, num_rows = step([(0, prompt)])
        seconds = bench.seconds(run, repeats=5)
        bench.add(f"{shape.name}, a prompt of {prompt}", ms=seconds * 1e3, tokens_per_s=num_rows / seconds,
                  share=prompt_floor(shape, prompt, bench.rates) / seconds)  # fmt: skip


def run_step(
    decoder: Decoder, ids: Tensor, positions: Tensor, batch: AttentionBatch, memory: KVMemory, ends: Tensor
) -> Tensor:
    """Run a step of a model, and sample a token of each sequence greedily."""
    hidden = decoder(ids, positions, [batch], [memory])
    return decoder.logits(hidden[ends]).argmax(-1)


def measure_engine(bench: Bench) -> None:
    """Measure the benchmark of nano-vllm: 256 requests of 100 to 1,024 tokens in and out; then with prefix hits."""
    shape = REHEARSED if bench.is_rehearsal else QWEN_06B
    if bench.left_s() < 120:
        return bench.add("engine", skipped="no time is left")
    try:
        from quire import LLM, SamplingParams
        from benchmarks.make_model import write  # isort: skip
    except ImportError as error:
        return bench.add("engine", skipped=f"needs all that Quire depends on: {error}")
    sizes = (3, 4, 9) if bench.is_rehearsal else (NUM_REQUESTS, LEAST, MOST)
    requests = nano_requests(shape.vocab_size, *sizes)
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count) for _, count in requests]
    tokens = sum(count for _, count in requests)
    with tempfile.TemporaryDirectory() as name:
        write(shape.config(), Path(name))
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "kernels": "triton",
            "device": bench.device.type,
            "dtype": "bfloat16",
            "block_size": BLOCK_SIZE,
            "max_model_len": 4096 if not bench.is_rehearsal else 64,
        }
        if bench.is_rehearsal:
            options |= {"num_kv_blocks": 40}
        captured: dict[str, Any] = {"cudagraph_capture_sizes": (1, 4)} if bench.is_rehearsal else {}
        llm = LLM(name, **options, **captured, async_scheduling=True)
        llm.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        seconds, steps = timed_generate(llm, prompts, params)
        bench.add(
            "nano-vllm's benchmark",
            s=seconds,
            tokens_per_s=tokens / seconds,
            ms_a_step=seconds / steps * 1e3,
            captured=str(llm.engine.config.cudagraph_capture_sizes[-1:]),
        )
        started = time.perf_counter()
        hits = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        again = time.perf_counter() - started
        cached = sum(output.num_cached_tokens or 0 for output in hits)
        bench.add("the same prompts again, from the cache", s=again, cached=cached / sum(map(len, prompts)))
        llm.engine.close()
        del llm
        gc.collect()
        for other, more in (
            ("one step after the other", {**captured, "async_scheduling": False}),
            ("nothing captured", {"enforce_eager": True, "async_scheduling": True}),
        ):
            if bench.left_s() <= 60 + 4 * seconds:
                break
            llm = LLM(name, **options, **more)
            llm.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            seconds, steps = timed_generate(llm, prompts, params)
            bench.add(f"nano-vllm's benchmark, {other}", s=seconds, tokens_per_s=tokens / seconds,
                      ms_a_step=seconds / steps * 1e3)  # fmt: skip
            llm.engine.close()
            del llm
            gc.collect()
    return None


def timed_generate(llm: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> tuple[float, int]:
    """Generate; return the seconds and the number of steps."""
    before, started = llm.engine.num_steps, time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, llm.engine.num_steps - before
