"""What the backend launches compiles for GPUs that are not there, within their limits; nothing of it is run.

The launches are those that the backend makes for worlds of the shapes of models, recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quire.execution.sampling.device.known_rows import know_rows
from quire.execution.sampling.row_sampling import SamplingState
from quire.scheduling.plan import NewSequence
from quire.sequences.params import SamplingParams
from tests.ops.test_float8_weights import float8_weight
from tests.ops.test_quantized_weights import FORMS, random_weight
from tests.ops.test_states import World as StatesWorld
from tests.ops.triton.ahead_of_time import SHARED_LIMIT, Compiled, Launch, compile_for, recorded, triton
from tests.ops.world import World, randn

from quire.ops.interface.fused_layers import RoutedExperts  # isort: skip
from quire.ops.interface.lora import LoraPart, LoraRows, LoraWeight  # isort: skip
from quire.ops.interface.quantized_weight import StoredWeight  # isort: skip - the modules above skip where Triton is missing
from quire.ops.interface.static_steps import StaticLimits, StaticMemory  # isort: skip
from quire.ops.triton.launches import Device  # isort: skip
from quire.ops.triton.step_states import TritonStepStates  # isort: skip
from quire.ops.triton.triton_ops import TritonOps  # isort: skip
from quire.ops.interface.weight_formats import FORMS as ROUNDED  # isort: skip
from quire.ops.interface.weight_memory import WeightMemory  # isort: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set"),
    # Triton 3.9 says that a later one will no longer join products and sums by itself.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

# Launches are recorded, not made, so there need be no GPU; where there is one, they are those of any machine.
CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPABILITIES = tuple(SHARED_LIMIT)
# Launches from Hopper on; see kernels/overlap.py.
OVERLAPPING = {"OVERLAPS": True, "launch_pdl": True}
# Products of prompts: those of warp groups, and those of tensor memory.
MATRIX_INSTRUCTIONS = {90: "HGMMA", 100: "UTC.?HMMA|UTCHMMA"}
EXPERT_KERNELS = {"multiply_by_expert", "multiply_stored_by_expert"}
CORRECTING_KERNELS = {"correct_within_chunks", "correct_across_chunks"}
# Registers of a thread with which three programs of 128 threads share a processor.
DECODE_REGISTERS = 168
LLAMA = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "dtype": BF16}
QWEN = {**LLAMA, "group": 2, "has_norms": True}
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": QWEN,
    "gpt-oss": {**LLAMA, "group": 8, "head_dim": 64, "window": 128, "has_sinks": True},
    "llama4": {**LLAMA, "group": 5, "chunk": 8192},
    "head_dim 80": {**LLAMA, "group": 1, "head_dim": 80},
    "head_dim 96": {**LLAMA, "group": 1, "head_dim": 96},
    "gemma": {**LLAMA, "num_kv_heads": 4, "group": 2, "head_dim": 256, "has_norms": True},
    "gemma2": {**LLAMA, "num_kv_heads": 4, "group": 2, "head_dim": 256, "window": 4096, "soft_cap": 50.0},
    "float16": {**LLAMA, "dtype": FP16},
    "int8": {**LLAMA, "stored": "int8"},
    "fp8": {**LLAMA, "stored": "fp8"},
    "float32": {**LLAMA, "dtype": FP32},
}
# GPUs for consumers, of compute capability 8.6, 8.9 and 12.0, have the least shared memory for a program.
CONSUMER_LIMIT = 99 << 10
GEMMA4 = {**LLAMA, "num_kv_heads": 2, "group": 8, "head_dim": 512}
CONSUMER_ATTENTION: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "fp8": {**LLAMA, "stored": "fp8"},
    "gemma4": GEMMA4,
    "gemma4 float32": {**GEMMA4, "dtype": FP32},
    "gemma4 float32 fp8": {**GEMMA4, "dtype": FP32, "stored": "fp8"},
    "gemma4 float32 int8": {**GEMMA4, "dtype": FP32, "stored": "int8"},
    "gemma3 float32 int8": {**GEMMA4, "head_dim": 256, "group": 4, "dtype": FP32, "stored": "int8"},
}
STORED = {name: FORMS[name] for name in ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", "awq")}
# Of weights that are rounded as they are loaded.
STORED |= {f"rounded {name}": form for name, form in ROUNDED.items()}


def attention_launches(options: dict[str, Any], capability: int) -> list[Launch]:
    """Return what decodes, a long context, a shared one, a prompt and captured decodes launch, in this order."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    ops.device.capability, ops.device.num_processors = divmod(capability, 10), 132
    if capability >= 90:
        ops.device.overlapping = OVERLAPPING
    with recorded(launches), torch.inference_mode():
        for spans in ([(700, 1), (15, 1)], [(0, 300)]):
            World(spans, **options).run(ops)
        world = World([(280, 1)] * 9, **options | {"window": None})
        tables = world.batch.block_ids.view(9, -1)
        tables[1:, :16] = tables[0, :16]
        world.run(ops)
        world = World([(15, 1)], **options)
        memory, limits = StaticMemory(CPU), StaticLimits(4, 8)
        static = ops.static_tokens(world.kv, world.batch.window, world.batch.chunk, memory, limits)
        assert static is not None
        nothing = torch.zeros(0, dtype=torch.int64)
        static.write_tokens(nothing, torch.zeros(1, dtype=torch.int64), nothing, 4)
        group, heads = options["group"], options["num_kv_heads"]
        q = randn(4, group * heads, options["head_dim"], dtype=options["dtype"])
        ops.step_attention(static.batch(4), world.kv).attend(1, q, 1.0, world.sinks, world.soft_cap)
    assert any(launch.arguments.get("COUNTED") for launch in launches)
    return launches


def check_limits(found: Compiled, capability: int, *, may_spill: bool = False) -> None:
    assert found.shared <= SHARED_LIMIT[capability]
    assert found.registers <= 255
    if capability == 90 and not may_spill:
        assert found.spilled == 0
        assert not re.search(r"\b(LDL|STL)\b", found.assembly)


@pytest.mark.parametrize("architecture", [86, 120])
@pytest.mark.parametrize("name", CONSUMER_ATTENTION)
def test_attention_fits_gpus_for_consumers(name: str, architecture: int) -> None:
    launches = attention_launches(CONSUMER_ATTENTION[name], architecture)
    assert len(launches) > 3
    for launch in launches:
        assert compile_for(launch, architecture).shared <= CONSUMER_LIMIT, launch.kernel.__name__


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, capability: int) -> None:
    options = ATTENTION[name]
    seen = set()
    for launch in attention_launches(options, capability):
        found = compile_for(launch, capability)
        # Nothing is served in float32 for its speed: it has no tensor cores.
        check_limits(found, capability, may_spill=options["dtype"] is FP32)
        kernel = launch.kernel.__name__
        seen.add(kernel)
        if kernel == "attend_shared" and options["dtype"] is not FP32:
            check_shared(found, launch, capability)
        if kernel != "attend":
            continue
        constants = launch.arguments
        if capability == 90:
            # In front of the wait for the kernel before, six numbers of an item and block ids are loaded, and keys and
            # values of decodes are fetched.
            early = found.assembly[: found.assembly.rindex("ACQBULK")]
            assert early.count("LDG") >= 7
            assert ("CCTL.E.PF2" in early) != constants["PIPELINED"]
        is_prompt = launch.options["num_warps"] == 8 or constants["ROWS"] >= 64
        if options["dtype"] is FP32:
            continue
        if is_prompt and constants["ROWS"] >= 64 and capability >= 90:
            assert re.search(MATRIX_INSTRUCTIONS[capability], found.assembly)
        is_plain = constants["STORED"] == 0 and not constants["CAPPED"] and constants["DIM"] <= 128
        assert constants["PIPELINED"] == (is_prompt and capability == 90 and is_plain)
        if constants["PIPELINED"]:
            # One wait in each loop, for the scores, one behind each, and one at the end: where the compiler gives up on
            # products that others run beside, it waits for each instruction of them.
            num_loops = 1 if constants["WINDOW"] or constants["CHUNK"] else 2
            assert found.assembly.count("WARPGROUP.DEPBAR") <= 2 * num_loops + 1
        if not is_prompt and capability == 90:
            if constants["STORED"] != 1:  # slots of int8, with their scales, are multiples of 4 bytes only
                assert found.registers <= DECODE_REGISTERS
                assert re.search(r"LDGSTS\S*\.128", found.assembly)
            # Two tiles of keys and of values are under way: an id that was loaded in the iteration that needs it would
            # leave one.
            slot = 128 if constants["STORED"] == 2 else 2 * constants["DIM"]
            if constants["STORED"] != 1 and not constants["WINDOW"]:
                assert found.shared >= 2 * slot * constants["TOKENS"] * (launch.options["num_stages"] - 1)
    assert seen == {"prepare_heads", "attend_shared", "attend", "combine"}


def check_shared(found: Compiled, launch: Launch, capability: int) -> None:
    """Check that the tile of shared tokens multiplies by warp groups, and loads as decodes do."""
    constants = launch.arguments
    if constants["ROWS"] >= 64 and capability >= 90:
        assert re.search("HGMMA" if capability == 90 else "UTC.?HMMA|UTCHMMA", found.assembly)
    if capability == 90 and constants["STORED"] != 1:
        assert re.search(r"LDGSTS\S*\.128", found.assembly)
        slot = 128 if constants["STORED"] == 2 else 2 * constants["DIM"]
        assert found.shared >= 2 * slot * constants["TOKENS"] * (launch.options["num_stages"] - 1)


def other_launches() -> list[Launch]:
    """Return the launches of all other kernels, in the dtypes of models."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    ops.device.num_processors = 132
    with recorded(launches), torch.inference_mode():
        for dtype in (BF16, FP16):
            x = randn(3, 4096, dtype=dtype)
            ops.rms_norm(x, randn(4096, dtype=dtype), 1e-5)
            ops.rms_norm(x, randn(4096), 1e-5)
            for activation in ("silu", "gelu_tanh", "swigluoai"):
                ops.gate(x, activation)  # type: ignore[arg-type]
            ops.sigmoid_gate(x, x)
            ops.gated_norm(x.float(), x, randn(8, 512), 1e-5)
        ops.apply_token_bitmask(randn(2, 128256), [1], [torch.zeros(4008, dtype=torch.int32)])
    return launches


def sampling_launches() -> list[Launch]:
    """Return the launches that choose tokens of all kinds, with and without states of before."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    params: tuple[dict[str, Any], ...] = ({}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 999, "min_p": 0.1})
    states = [SamplingState(NewSequence(SamplingParams(**each), 1, 0, 1, (1,), ()), CPU) for each in params]
    logits, positions = torch.zeros(4, 128_256), torch.arange(4)
    parameters = know_rows(states, 128_256, CPU).parameters
    with recorded(launches), torch.inference_mode():
        before = ops.check_logits(logits)
        ops.draw_tokens(logits, None, None, None)
        for each in (None, before):
            ops.draw_tokens(logits, parameters, positions, each)
    return launches


def few_rows_launches() -> list[Launch]:
    """Return products of one and two rows, with and without gates, of shapes of models."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    with recorded(launches), torch.inference_mode():
        for ops.device.overlapping in ({"OVERLAPS": False}, OVERLAPPING):
            for dtype in (BF16, FP16):
                for num_columns, width in ((6144, 4096), (1024, 3072)):
                    weight = torch.zeros(num_columns, width, dtype=dtype)
                    plain, gated = ops.pack_linear(weight), ops.pack_linear(weight, gate="silu")
                    for num_rows in (1, 2):
                        x = torch.zeros(num_rows, width, dtype=dtype)
                        plain(x, torch.zeros(num_rows, num_columns, dtype=dtype))
                        gated(x)
                        gated(x, torch.zeros(num_rows, num_columns, dtype=dtype))
    assert {launch.kernel.__name__ for launch in launches} == {"multiply_few_rows"}
    return launches


def adapter_launches() -> list[Launch]:
    """Return what adapters of ranks 16 and 64 add to rows of decodes and of prompts, of shapes of models."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    with recorded(launches), torch.inference_mode():
        for dtype in (BF16, FP16):
            for rank, num_columns, width in ((16, 6144, 4096), (64, 1024, 3072)):
                layer = ops.make_lora(num_columns)
                part = LoraPart(torch.zeros(num_columns, rank, dtype=dtype), 0, 0)
                layer.put(0, layer.pack(LoraWeight(torch.zeros(rank, width, dtype=dtype), (part,)), WeightMemory(1)))
                for num_rows in (3, 400):
                    layer(torch.zeros(num_rows, width, dtype=dtype), LoraRows(num_rows, {0: [*range(num_rows)]}), None)
    return launches


def state_launches(
    head_dim: int, state_dim: int, capability: int, dtypes: tuple[torch.dtype, ...] = (BF16, FP16)
) -> list[Launch]:
    """Return the launches of recurrences over states [head_dim, state_dim], row by row and in chunks."""
    device = Device(CPU)
    device.capability = divmod(capability, 10)
    launches: list[Launch] = []
    with recorded(launches), torch.inference_mode():
        for dtype in dtypes:
            world = StatesWorld(
                [(2, True), (70, False)], num_heads=32, head_dim=head_dim, state_dim=state_dim, dtype=dtype
            )
            world.run(partial(TritonStepStates, device=device))
    return launches


def scan_launches(head_dim: int, state_dim: int, capability: int) -> list[Launch]:
    """Return the launches of recurrences but for the delta rule in chunks, whose work does not grow with the state."""
    launches = state_launches(head_dim, state_dim, capability)
    return [launch for launch in launches if launch.kernel.__name__ not in CORRECTING_KERNELS]


def correction_launches(capability: int) -> list[Launch]:
    """Return the launches of the delta rule in chunks, over states of 128 x 128; numbers of values are loaded only."""
    launches = state_launches(128, 128, capability, (BF16,))
    return [launch for launch in launches if launch.kernel.__name__ in CORRECTING_KERNELS]


def stored_weight(name: str, num_rows: int, width: int) -> StoredWeight:
    weight = float8_weight(128, num_rows, width) if name == "e4m3" else random_weight(STORED[name], num_rows, width)
    return StoredWeight((weight,), BF16)


def expert_launches(name: str | None = None) -> list[Launch]:
    """Return the launches of the experts of a layer, for few rows and for many; of stored weights of a form."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)

    def weight(num_rows: int, width: int) -> torch.Tensor | StoredWeight:
        return randn(num_rows, width, dtype=BF16) if name is None else stored_weight(name, num_rows, width)

    gate_ups = [ops.pack_linear(weight(512, 1024), gate="silu") for _ in range(8)]
    downs = [ops.pack_linear(weight(1024, 256)) for _ in range(8)]
    router = ops.pack_linear(randn(8, 1024, dtype=BF16))
    options = (2, None, None, False, True, False, 0.0, 1.0, 1.0, None, None, 8)
    experts = ops.fuse_experts(RoutedExperts(router, gate_ups, downs, *options))
    assert experts is not None
    with recorded(launches), torch.inference_mode():
        for num_rows in (3, 400):
            x = randn(num_rows, 1024, dtype=BF16)
            experts(x, x, None)
    return launches


def stored_launches(name: str) -> list[Launch]:
    """Return the launches of a product of one row, and of many."""
    launches: list[Launch] = []
    ops = TritonOps(CPU)
    ops.device.num_processors = 132
    with recorded(launches), torch.inference_mode():
        linear = ops.pack_linear(stored_weight(name, 256, 1024))
        for num_rows in (1, 80):
            linear(randn(num_rows, 1024, dtype=BF16), randn(num_rows, 256, dtype=BF16))
    return launches


OTHERS: dict[str, Callable[[], list[Launch]]] = {
    "rows": other_launches,
    "few rows": few_rows_launches,
    "adapters": adapter_launches,
    "sampling": sampling_launches,
    "experts": expert_launches,
}
OTHERS |= {name: partial(stored_launches, name) for name in (*STORED, "e4m3")}
OTHERS |= {f"experts, {name}": partial(expert_launches, name) for name in (*STORED, "e4m3")}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name: str, capability: int) -> None:
    launches = OTHERS[name]()
    assert launches
    for launch in launches:
        overlaps = "launch_pdl" in launch.options
        if overlaps and capability < 90:
            continue
        found = compile_for(launch, capability)
        check_limits(found, capability)
        if launch.kernel.__name__ == "multiply_few_rows":
            # Weights are loaded before the wait for the kernel before.
            assert re.search(r"LDG\.E\.128", found.assembly.partition("ACQBULK")[0])
            assert ("ACQBULK" in found.assembly) == overlaps
        if launch.kernel.__name__ in ("lora_shrink", "lora_expand"):
            assert re.search(r"LDG(STS)?\.E\S*\.128", found.assembly)
        if launch.kernel.__name__ not in EXPERT_KERNELS:
            continue
        if launch.arguments["ROWS"] >= 64 and capability >= 90:
            assert re.search(MATRIX_INSTRUCTIONS[capability], found.assembly)
        # Addresses of weights are known to be aligned: only levels of codes are looked up one by one, in a table.
        if capability == 90:
            assert not re.search(r"LDG\.E\.U8" if launch.arguments.get("TABLE") else r"LDG\.E\.U(8|16)", found.assembly)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "state_dim"), [(64, 128), (64, 256)])
def test_states(head_dim: int, state_dim: int, capability: int) -> None:
    launches = scan_launches(head_dim, state_dim, capability)
    assert launches
    for launch in launches:
        check_limits(compile_for(launch, capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_delta_rule_in_chunks(capability: int) -> None:
    """Both kernels multiply in their loops; the one that carries states loads the next chunk meanwhile."""
    launches = correction_launches(capability)
    assert [launch.kernel.__name__ for launch in launches] == ["correct_within_chunks", "correct_across_chunks"]
    for launch in launches:
        found = compile_for(launch, capability)
        check_limits(found, capability)
        if capability >= 90:
            assert re.search(MATRIX_INSTRUCTIONS[capability], found.assembly)
            is_carried = launch.kernel.__name__ == "correct_across_chunks"
            assert not is_carried or re.search(r"LDGSTS\S*\.128", found.assembly)
