"""Checks of every kernel on the device against the reference implementation, before any measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.gpu.adapters import adapters_error
from benchmarks.gpu.captured_correctness import captured_attention_error
from benchmarks.gpu.draws_correctness import share_of_other_tokens
from benchmarks.gpu.memory import make_batch, make_memory, make_rotation, num_blocks_of
from benchmarks.gpu.timing import Bench
from quire.ops.interface.ops import Activation, HeadNorms, Ops, StateBatch
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, WeightForm
from quire.ops.interface.recurrent_weights import SSMHeads
from quire.ops.pytorch.recurrent_mixers import Recurrence
from quire.ops.reference.reference_ops import ReferenceOps
from quire.ops.reference.reference_states import ReferenceStepStates
from quire.ops.triton.linear.expert_rows import group_rows
from quire.ops.triton.linear.stored_experts import stored_layer
from quire.ops.triton.step_states import TritonStepStates
from quire.ops.triton.triton_ops import TritonOps

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
CPU: Final = torch.device("cpu")
# Each takes half a GiB of the GPU for itself.
MOST_PROCESSES: Final = 14
SPANS: Final = [(15, 1), (16, 1), (0, 1), (30, 40), (700, 1), (5, 3)]
FORMS: Final = {
    "int4": WeightForm(4, 32, "float16", offset=8),
    "int4 with minima": WeightForm(4, 32, "float16", has_mins=True),
    "int4 with zero points": WeightForm(4, 32, "bfloat16", has_zero_points=True),
    "mxfp4": WeightForm(4, 32, "bfloat16", levels=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
    "int8": WeightForm(8, 32, "bfloat16", offset=128),
    "e4m3": WeightForm(8, 128, "float32", levels="e4m3"),
}


class CaseResult(NamedTuple):
    """The largest error of a case, and its tolerance."""

    error: float
    allowed: float


def compare(found: Tensor, expected: Tensor, factor: float = 1.0) -> CaseResult:
    """Return the largest difference relative to the largest magnitude; infinity if only one of both has a NaN."""
    found, expected = found.float().cpu(), expected.float().cpu()
    if not torch.equal(found.isnan(), expected.isnan()):
        return CaseResult(float("inf"), 0.0)
    largest = max(1e-30, expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    return CaseResult((found - expected).nan_to_num(0.0, 0.0, 0.0).abs().max().item() / largest, factor)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_case(
    ops: Ops, device: torch.device, dtype: torch.dtype, stored: torch.dtype, head_dim: int = 128, group: int = 4,
    spans: list[tuple[int, int]] = SPANS, window: int | None = None, chunk: int | None = None, extras: bool = False,
    shared: int = 0,
) -> CaseResult:  # fmt: skip
    """Store keys and values, and attend; `extras`: QK norms and sinks; `shared`: prefix length of all histories."""
    num_kv, outputs = 2, []
    for backend, place in ((ReferenceOps(), CPU), (ops, device)):
        batch = make_batch(spans, place, window=window, chunk=chunk, shared=shared)
        memory = make_memory(num_blocks_of(spans), 2, num_kv, head_dim, CPU, stored, dtype)
        values = randn(*memory.data.shape[:-1], head_dim, seed=3)
        if stored == torch.int8:
            memory.data[..., :head_dim] = (values * 40).clamp(-127, 127).to(torch.int8)
            memory.data.view(torch.float32)[..., -1] = 0.02
        else:
            memory.data.copy_(values.to(stored))
        memory = memory._replace(data=memory.data.to(place))
        num_rows = batch.row_starts[-1]
        qkv = randn(num_rows, (group + 2) * num_kv * head_dim).to(place, dtype)
        norms = HeadNorms(randn((group + 1) * num_kv, head_dim, seed=5).to(place, dtype), 1e-5) if extras else None
        step = backend.step_attention(batch, memory)
        queries = step.prepare(1, qkv, norms, make_rotation(num_rows, head_dim, dtype, place))
        sinks = randn(group * num_kv, seed=6).to(place) if extras else None
        outputs.append((step.attend(1, queries, head_dim**-0.5, sinks), queries))
    results = [compare(found, expected) for found, expected in zip(outputs[1], outputs[0], strict=True)]
    return CaseResult(max(each.error for each in results), TOLERANCE[dtype] * (3 if stored.itemsize == 1 else 1))


def rows_case(ops: Ops, device: torch.device, dtype: torch.dtype) -> CaseResult:
    """Norms, gates, and token bitmasks."""
    x, weight = randn(5, 2048).to(dtype), randn(1024, seed=1).to(dtype)
    logits = randn(3, 1100)
    masks = [torch.randint(-(2**31), 2**31, (35,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))]

    def outputs(backend: Ops, place: torch.device) -> list[Tensor]:
        rows = x.to(place)
        half = rows[:, :1024].contiguous()
        kept = logits.to(place).clone()
        backend.apply_token_bitmask(kept, [1], masks)
        gated = [backend.gate(rows, activation) for activation in get_args(Activation)]
        parts = randn(2, 512, seed=2).to(place)
        return [
            *gated,
            backend.rms_norm(half, weight.to(place), 1e-5),
            backend.sigmoid_gate(half, half),
            backend.gated_norm(half.float(), half, parts, 1e-5),
            kept,
        ]

    pairs = zip(outputs(ops, device), outputs(ReferenceOps(), CPU), strict=True)
    return CaseResult(max(compare(found, expected).error for found, expected in pairs), TOLERANCE[dtype])


def stored_weight(form: WeightForm, seed: int = 4) -> StoredWeight:
    """Return a random weight [300, 512]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (300, 512), generator=generator).to(torch.uint8)
    if form.levels == "e4m3":
        codes[(codes & 127) == 127] = 126
    scales = (torch.randn(300, 512 // form.group, generator=generator) * 1e-2).to(getattr(torch, form.scale))
    zeros = torch.randint(0, 16, scales.shape, generator=generator).to(torch.uint8) if form.has_zero_points else None
    rows = QuantizedRows(codes, scales, scales.flip(0) if form.has_mins else None, zeros)
    return StoredWeight((QuantizedWeight(form, (300, 512), rows.at, codes.nbytes),), torch.float32)


def stored_case(ops: Ops, device: torch.device, form: WeightForm, num_rows: int) -> CaseResult:
    """Multiply by a stored weight, in float32: the only error left is the rounding of sums."""
    weight = stored_weight(form)
    x, residual = randn(num_rows, 512), randn(num_rows, 300, seed=1)
    found = ops.pack_linear(weight)(x.to(device), residual.to(device))
    return compare(found, ReferenceOps().pack_linear(weight)(x, residual), 1e-5)


def stored_experts_case(ops: Ops, device: torch.device, form: WeightForm, num_rows: int) -> CaseResult:
    """Multiply rows by the stored weights of two of four experts each, in float32."""
    num_experts, x = 4, randn(num_rows, 512)
    weights = [stored_weight(form, seed) for seed in range(num_experts)]
    layer = stored_layer([ops.pack_linear(weight) for weight in weights])
    assert layer is not None, "weights of one form are alike"
    chosen = randn(num_rows, num_experts, seed=1).topk(2).indices
    groups = group_rows(chosen.to(device), torch.ones(num_rows, 2, device=device), num_experts)
    found = layer.multiply(x.to(device), groups, is_first=True, scales_input=False)
    outputs = torch.stack([ReferenceOps().pack_linear(weight)(x) for weight in weights])
    expected = outputs[chosen.flatten().sort(stable=True).values, groups.row_ids.cpu()]
    return compare(found, expected, 1e-5)


def few_rows_case(ops: Ops, device: torch.device, dtype: torch.dtype, num_rows: int) -> CaseResult:
    """Multiply few rows by plain weights, with gates too, with a residual and without."""
    results = []
    for num_columns, width, gate in ((8192, 512, None), (520, 1024, None), (1040, 4096, "silu")):
        weight = (randn(num_columns, width) * width**-0.5).to(dtype)
        x = randn(num_rows, width, seed=1).to(dtype)
        residual = randn(num_rows, num_columns, seed=2).to(dtype)
        linear, twin = (backend.pack_linear(weight, gate=gate) for backend in (ops, ReferenceOps()))  # type: ignore[arg-type]
        results.append(compare(linear(x.to(device)), twin(x, None)))
        results.append(compare(linear(x.to(device), residual.to(device)), twin(x, residual)))
    return CaseResult(max(each.error for each in results), TOLERANCE[dtype])


def adapters_case(ops: TritonOps, device: torch.device, dtype: torch.dtype) -> CaseResult:
    """Apply LoRA adapters of several rows."""
    return CaseResult(adapters_error(ops, device, dtype), TOLERANCE[dtype])


def draws_case(ops: TritonOps, device: torch.device, vocab_size: int) -> CaseResult:
    """Sample the tokens of rows of all kinds."""
    return CaseResult(share_of_other_tokens(ops, device, vocab_size), 0.1)


def captured_case(ops: TritonOps, device: torch.device, **options: int) -> CaseResult:
    """Replayed attention equals eager attention, bit for bit."""
    return CaseResult(captured_attention_error(ops, device, **options), 0.0)


class StatesMemory(NamedTuple):
    """Recurrent states of one layer; a `PagedStates`."""

    conv_states: list[Tensor]
    ssm_states: list[Tensor]


def states_case(device: torch.device, ops: TritonOps, dtype: torch.dtype, size: int = 64) -> CaseResult:
    """Convolve, scan, and apply the delta rule, row by row and in chunks, from a state and from none; states are
    [size, size].
    """
    batch = StateBatch([3, 1, 2, 5, 4], [0, 1, 40, 43, 200, 280], [True, False, True, True, False])
    num_heads, dim, width = 4, size, size
    channels = num_heads * dim + 2 * width

    def outputs(place: torch.device) -> list[Tensor]:
        memory = StatesMemory([randn(6, 3, channels).to(place, dtype)], [randn(6, num_heads, dim, width).to(place)])
        step: Recurrence = ReferenceStepStates(batch, memory)
        if place == device:
            step = TritonStepStates(batch, memory, ops.device)
        rows, steps = randn(280, channels, seed=7).to(place, dtype), randn(280, num_heads, seed=8).to(place)
        heads = SSMHeads(*(part.to(place) for part in (-randn(num_heads).exp(), randn(num_heads), randn(num_heads))))
        convolved = step.causal_conv(0, rows, randn(4, channels, seed=9).to(place), None, True)
        x, writes, reads = rows.split_with_sizes((num_heads * dim, width, width), 1)
        scanned = step.ssm_scan(0, x, writes, reads, steps, heads)
        keys = torch.nn.functional.normalize(rows[:, :dim].float(), dim=-1)
        corrected = step.gated_delta_rule(0, keys, keys, x, -steps.abs(), steps.sigmoid())
        return [convolved, scanned, corrected, memory.conv_states[0], memory.ssm_states[0]]

    expected = outputs(torch.device("cpu", 0) if device.type == "cpu" else CPU)
    pairs = zip(outputs(device), expected, strict=True)
    return CaseResult(max(compare(found, each).error for found, each in pairs), max(2e-4, TOLERANCE[dtype] / 2))


def cases(ops: TritonOps, device: torch.device, is_rehearsal: bool) -> dict[str, Callable[[], CaseResult]]:
    """Return all cases by name; for a rehearsal, a few small ones."""
    attention = partial(attention_case, ops, device)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    fp8, int8 = torch.float8_e4m3fn, torch.int8
    if is_rehearsal:
        small: dict[str, Any] = {"head_dim": 16, "spans": [(15, 1), (3, 4)]}
        return {
            "attention": partial(attention, fp32, fp32, **small, extras=True),
            "rows": partial(rows_case, ops, device, fp32),
            "stored int4, 2 rows": partial(stored_case, ops, device, FORMS["int4"], 2),
            "experts of stored int4, 2 rows": partial(stored_experts_case, ops, device, FORMS["int4"], 2),
            "few rows, 2": partial(few_rows_case, ops, device, bf16, 2),
            "adapters": partial(adapters_case, ops, device, bf16),
            "choice of tokens": partial(draws_case, ops, device, 500),
            "captured attention": partial(captured_case, ops, device, head_dim=16),
            "shared tokens": partial(attention, fp32, fp32, 16, spans=[(300, 1), (280, 2)], shared=256),
            "captured attention, shared tokens": partial(captured_case, ops, device, head_dim=16, shared=256),
        }
    found: dict[str, Callable[[], CaseResult]] = {}
    for dtype in (bf16, fp16, fp32):
        for stored in (dtype, int8, fp8):
            found[f"attention, {dtype} in {stored}"] = partial(attention, dtype, stored, extras=stored == dtype)
        found[f"rows, {dtype}"] = partial(rows_case, ops, device, dtype)
        found[f"adapters, {dtype}"] = partial(adapters_case, ops, device, dtype)
        found[f"states, {dtype}"] = partial(states_case, device, ops, dtype)
        found[f"states of 128 x 128, {dtype}"] = partial(states_case, device, ops, dtype, 128)
    for head_dim in (64, 80, 96, 256):
        found[f"attention, heads of {head_dim}"] = partial(attention, bf16, bf16, head_dim)
    for group in (1, 7, 8, 16):
        found[f"attention, groups of {group}"] = partial(attention, bf16, bf16, group=group)
    # 36 sequences save more than `launch_bytes`, and take several tiles.
    spans = [(1024 + 7 * seq, 1 + seq % 3) for seq in range(36)]
    for stored in (bf16, int8, fp8):
        found[f"shared tokens in {stored}"] = partial(attention, bf16, stored, spans=spans, shared=1024)
    for group, head_dim in ((1, 64), (7, 128), (8, 64), (4, 256)):
        found[f"shared tokens, groups of {group}, heads of {head_dim}"] = partial(
            attention, bf16, bf16, head_dim, group, spans, extras=True, shared=1024
        )
    found["attention, window of 33"] = partial(attention, bf16, bf16, window=33, extras=True)
    found["attention, chunks of 40"] = partial(attention, bf16, bf16, chunk=40)
    for captured in ({}, {"window": 33}, {"chunk": 40}, {"head_dim": 64}, {"shared": 2048}):
        found[f"captured attention {captured or ''}"] = partial(captured_case, ops, device, **captured)
    for num_rows in (1, 2):
        for dtype in (bf16, fp16):
            found[f"few rows, {num_rows}, {dtype}"] = partial(few_rows_case, ops, device, dtype, num_rows)
    for vocab_size in (5_003, 151_936):
        found[f"choice of tokens, of {vocab_size}"] = partial(draws_case, ops, device, vocab_size)
    for name, form in FORMS.items():
        for num_rows in (1, 70):
            found[f"stored {name}, {num_rows} rows"] = partial(stored_case, ops, device, form, num_rows)
            experts = partial(stored_experts_case, ops, device, form, num_rows)
            found[f"experts of stored {name}, {num_rows} rows"] = experts
    return found


def run_cases(ops: TritonOps, device: torch.device, shard: slice) -> dict[str, CaseResult | str]:
    """Run some of the cases; of one that fails, return why."""
    found: dict[str, CaseResult | str] = {}
    with torch.inference_mode():
        for name, case in [*cases(ops, device, device.type == "cpu").items()][shard]:
            try:
                found[name] = case()
            except Exception as failure:  # a kernel that does not compile, or fails, is a wrong one; others still count
                found[name] = f"{type(failure).__name__}: {failure}"[:300]
    return found


def run_shard(shard: int, num_shards: int) -> dict[str, CaseResult | str]:
    """Run some of the cases in a process of its own."""
    device = torch.device("cuda")
    return run_cases(TritonOps(device), device, slice(shard, None, num_shards))


def check_all(bench: Bench, ops: TritonOps) -> bool:
    """Run all cases, print each, and return whether all are within their limits.

    Most of the time goes into compiling, so processes share the cases on a GPU; what they compile is kept on disk.
    """
    if bench.is_rehearsal:
        found = run_cases(ops, bench.device, slice(None))
    else:
        num_shards = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))
        found = {}
        with ProcessPoolExecutor(num_shards, mp_context=get_context("spawn")) as pool:
            for part in pool.map(run_shard, range(num_shards), repeat(num_shards)):
                found |= part
    is_right = True
    for name, result in found.items():
        if isinstance(result, str):
            bench.add(f"correct: {name}", ok=False, failure=result)
            is_right = False
            continue
        error, allowed = result
        bench.add(f"correct: {name}", ok=error <= allowed, error=error, allowed=allowed)
        is_right &= error <= allowed
    return is_right
