"""What adapters add to a layer's product, against the slow twin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LoRARequest, SamplingParams
from quire.ops.interface.lora import ANY_SLOT, LoraLayer, LoraPart, LoraRows, LoraWeight, TorchLoraLayer
from quire.ops.interface.weight_memory import WeightMemory
from tests.conformance.checkpoints import save_checkpoint
from tests.engine.test_adapters import WIDTHS
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.ops.test_lora import weight
from tests.ops.triton.device import DEVICE, MARKS, make_ops, randn
from tests.ops.triton.test_engine import load

from quire.ops.interface.static_steps import StaticLimits, StaticMemory  # isort: skip - the modules above skip without Triton
from quire.ops.triton import adapters  # isort: skip
from quire.ops.triton.adapters import (  # isort: skip
    FEW_ROWS,
    NUM_ENTRIES,
    AdapterTiles,
    TritonStaticAdapters,
    num_static_tiles,
)

pytestmark = MARKS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_COLUMNS = 200
NAMES = ("one", "two")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_device(made: LoraWeight) -> LoraWeight:
    return LoraWeight(made.a.to(DEVICE), tuple(part._replace(b=part.b.to(DEVICE)) for part in made.parts))


def filled(layer: LoraLayer, dtype: torch.dtype, width: int) -> LoraLayer:
    """Put adapters of parts of different ranks into all slots but the second; one slot is beyond a new table."""
    memory = WeightMemory(1 << 20)
    for slot in (3, 0, 2, 70):
        layer.put(slot, layer.pack(on_device(weight(dtype, width, slot)), memory))
    return layer


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 37, 1100])
def test_rows_of_all_adapters(dtype: torch.dtype, width: int) -> None:
    """Adapters of ranks of up to 34, slots without one, rows without a slot; the residual stays as it is."""
    generator = random.Random(5)
    layer, twin = (
        filled(each, dtype, width) for each in (make_ops().make_lora(NUM_COLUMNS), TorchLoraLayer(NUM_COLUMNS))
    )
    for num_rows in (1, 3, 16, 75):
        x = randn(num_rows, width + 3, dtype=dtype, seed=num_rows)[:, :width]
        slots = [generator.choice((None, 0, 1, 2, 3, 5, 70)) for _ in range(num_rows)]
        rows = LoraRows.of(slots, [1] * num_rows) or LoraRows(num_rows, {3: [0]})
        for residual in (None, randn(num_rows, NUM_COLUMNS, dtype=dtype, seed=1)):
            kept = residual if residual is None else residual.clone()
            assert_near(layer(x, rows, residual), twin(x, rows, residual))
            assert residual is None or kept is None or torch.equal(residual, kept)


def test_prompts_and_large_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of many rows, several of one adapter, and ranks that a program takes in several parts."""
    monkeypatch.setattr(adapters, "MOST_RANKS", 16)
    layers = make_ops().make_lora(NUM_COLUMNS), TorchLoraLayer(NUM_COLUMNS)
    for layer in layers:
        filled(layer, torch.bfloat16, 80)
    x, rows = randn(220, 80, dtype=torch.bfloat16), LoraRows.of([2, None, 0, 3], [150, 9, 1, 60])
    assert rows is not None
    found, expected = (layer(x, rows, None) for layer in layers)
    assert_near(found, expected)
    assert not found[150:159].any()


def test_a_row_gets_the_same_bits_in_every_batch_of_decodes() -> None:
    layer = filled(make_ops().make_lora(NUM_COLUMNS), torch.bfloat16, 1100)
    x, residual = randn(20, 1100, dtype=torch.bfloat16), randn(20, NUM_COLUMNS, dtype=torch.bfloat16, seed=1)
    slots = [(None, 0, 2, 3)[idx * 7 % 4] for idx in range(20)]
    rows = LoraRows.of(slots, [1] * 20)
    assert rows is not None
    together = layer(x, rows, residual)
    for row in (0, 1, 2, 3, 19):
        own = LoraRows.of(slots[row : row + 1], [1])
        alone = residual[row] if own is None else layer(x[row : row + 1], own, residual[row : row + 1])[0]
        assert torch.equal(together[row], alone)


def test_captured_steps_see_what_is_loaded_once_there_are_more_adapters_than_they_read() -> None:
    ops, memory = make_ops(), WeightMemory(1 << 20)
    layer = ops.make_lora(NUM_COLUMNS, 64)
    x, rows = randn(2, 64, dtype=torch.bfloat16), LoraRows(2, {ANY_SLOT: []})
    # A captured step reads entry 5 for its first row, and what was said of the table when it was captured.
    entries, firsts, ends, placed = (
        torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([5], [0], [1], [0, 1])
    )
    rows.placed = AdapterTiles(entries, firsts, ends, placed, FEW_ROWS)
    captured = layer._captured_table.data_ptr()
    for slot in (NUM_ENTRIES + 7, 4):
        layer.put(slot, layer.pack(on_device(weight(torch.bfloat16, 64, slot)), memory))
    assert layer._captured_table.data_ptr() == captured
    expected = layer(x[:1], LoraRows(1, {4: [0]}), None)
    assert expected.any()
    torch.testing.assert_close(layer(x, rows, None)[:1], expected, rtol=0.0, atol=0.0)
    layer.put(4, None)
    assert not layer(x, rows, None).any()


def test_a_slot_that_was_emptied_adds_nothing() -> None:
    layer = filled(make_ops().make_lora(NUM_COLUMNS), torch.float32, 64)
    layer.put(3, None)
    assert (layer.has([3]), layer.has([1, 0])) == (False, True)
    x, residual = randn(2, 64), randn(2, NUM_COLUMNS, seed=1)
    found = layer(x, LoraRows(2, {3: [0], 0: [1]}), residual)
    assert torch.equal(found[0], residual[0])
    assert not torch.equal(found[1], residual[1])


def test_a_row_that_is_not_finite_stays_alone() -> None:
    layer = filled(make_ops().make_lora(NUM_COLUMNS), torch.bfloat16, 64)
    x = randn(3, 64, dtype=torch.bfloat16)
    x[1, 5] = float("nan")
    found = layer(x, LoraRows(3, {0: [0, 1], 2: [2]}), None)
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()
    assert found[1].isnan().any()


class TestStaticRows:
    """Rows in static buffers, as captured steps have them, are those of a step that is launched as it comes."""

    def test_steps_one_after_the_other(self) -> None:
        generator = random.Random(2)
        memory = StaticMemory(torch.device(DEVICE))
        static = TritonStaticAdapters(memory, StaticLimits(80, 0))
        layer = filled(make_ops().make_lora(NUM_COLUMNS, 64), torch.bfloat16, 80)
        for num_rows in (80, 5, 33, 1):
            slots = [generator.choice((None, 0, 2, 3, 5, 70)) for _ in range(num_rows)]
            rows = LoraRows.of(slots, [1] * num_rows)
            size = 16 if num_rows == 5 else num_rows  # with padding
            static.write_adapters(rows, size)
            memory.upload()
            x = randn(size, 80, dtype=torch.bfloat16, seed=num_rows)
            residual = randn(size, NUM_COLUMNS, dtype=torch.bfloat16, seed=1)
            found = layer(x, static.rows(size), residual)
            expected = residual.clone()
            if rows is not None:
                assert static.takes(rows)
                expected[:num_rows] = layer(x[:num_rows], rows, residual[:num_rows])
            assert_near(found, expected)

    def test_what_they_have_no_room_for(self) -> None:
        static = TritonStaticAdapters(StaticMemory(torch.device(DEVICE)), StaticLimits(96, 0))
        assert num_static_tiles(96) == 70
        most = [*range(69), *[0] * 27]  # 16 rows of one adapter are a tile, and 12 more another
        for slots, expected in ((most, True), ([*range(71), *[None] * 25], False), ([5, NUM_ENTRIES - 1], False)):
            rows = LoraRows.of(slots, [1] * len(slots))
            assert rows is not None
            assert static.takes(rows) is expected, slots


class TestEngine:
    @pytest.mark.parametrize(("dtype", "num_requests", "tolerance"), [("float32", 4, 1e-3), ("bfloat16", 2, 0.1)])
    def test_greedy_tokens(self, dtype: str, num_requests: int, tolerance: float, tmp_path: Path) -> None:
        """Requests of two adapters and of the model alone, together, have the tokens of stock operators.

        In bfloat16, products of one and two rows are a kernel's, which adds what adapters give before a gate.
        """
        model = str(save_checkpoint("llama3", tmp_path / "model"))
        matrices = [random_matrices(WIDTHS, 4, seed) for seed in range(2)]
        paths = {name: str(write_adapter(tmp_path / name, each)) for name, each in zip(NAMES, matrices, strict=True)}
        requests = [LoRARequest("one"), None, LoRARequest("two"), LoRARequest("one")][:num_requests]
        prompts = [[idx * step % 190 + 5 for idx in range(9 + 5 * step)] for step in (7, 3, 11, 2)][:num_requests]
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)

        def run(kernels: str, **options: Any) -> list[tuple[list[int], list[float]]]:
            llm = load(model, kernels=kernels, dtype=dtype, enable_lora=True, lora_modules=paths, **options)
            found = []
            for output in llm.generate(prompts, params, lora_request=requests, use_tqdm=False):
                (sample,) = output.outputs
                assert sample.logprobs is not None
                pairs = zip(sample.logprobs, sample.token_ids, strict=True)
                found.append((list(sample.token_ids), [each[token].logprob for each, token in pairs]))
            if options:
                assert llm.engine.executor._runner.captured.num_replayed == 7  # type: ignore[attr-defined]
            return found

        twin = run("torch")
        for found in (run("triton"), run("triton", cudagraph_capture_sizes=(1, 4))):
            for (tokens, logprobs), (expected, expected_logprobs) in zip(found, twin, strict=True):
                # Where two tokens are within rounding of each other, what follows is another text.
                same = next((idx for idx, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), 8)
                assert same == 8 or (dtype == "bfloat16" and same >= 2)
                assert logprobs[:same] == pytest.approx(expected_logprobs[:same], abs=tolerance)

    def test_adapters_that_come_and_go(self, tmp_path: Path) -> None:
        """Captured steps take adapters that are loaded later, in the slots of others that went."""
        model = str(save_checkpoint("llama3", tmp_path / "model"))
        paths = {name: str(write_adapter(tmp_path / name, random_matrices(WIDTHS, rank, rank)))
                 for name, rank in (("one", 4), ("two", 8))}  # fmt: skip
        options: dict[str, Any] = {"cudagraph_capture_sizes": (1, 4), "async_scheduling": True}
        prompt, params = [7, 8, 9, 10, 11], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        outputs = []
        for each in ({}, options):
            llm = load(model, enable_lora=True, max_cpu_loras=1, max_lora_rank=8, **each)
            requests = [LoRARequest("one", 1, paths["one"]), None, LoRARequest("two", 2, paths["two"]), None]
            found = [llm.generate([prompt], params, lora_request=request, use_tqdm=False) for request in requests]
            outputs.append([list(output.outputs[0].token_ids) for (output,) in found])
        # Five of the steps of each, and the first one of the last: all but one token of its prompt are cached.
        assert llm.engine.executor._runner.captured.num_replayed == 4 * 5 + 1  # type: ignore[attr-defined]
        assert outputs[0] == outputs[1]
        assert outputs[0][1] == outputs[0][3]
        assert len({tuple(tokens) for tokens in outputs[0]}) == 3


def test_parts_share_no_columns() -> None:
    """A part's columns read zeros for the ranks of others, in whatever order parts come."""
    layer = make_ops().make_lora(6)
    b = torch.ones(2, 1, device=DEVICE)
    packed = layer.pack(
        LoraWeight(torch.ones(3, 8, device=DEVICE), (LoraPart(b, 2, 0), LoraPart(2 * b, 0, 4))), WeightMemory(1 << 20)
    )
    assert packed.b[:, :3].tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0], [2, 0, 0], [2, 0, 0]]
    assert not packed.b[:, 3:].any()
