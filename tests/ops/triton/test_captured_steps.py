"""Captured steps, by CUDA graphs or their twin: attention on static buffers, and whole engines on both."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from quire import SamplingParams
from quire.execution.runners.runner import ModelRunner
from quire.memory import check
from quire.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from tests.conformance.checkpoints import POOL_FACTORS, VOCAB_SIZE, ragged_prompts, save_checkpoint
from tests.conformance.conftest import REPRESENTATIVES, make_reference
from tests.models.gguf.cases import save_checkpoint as save_gguf_checkpoint
from tests.models.gguf.writer import write_gguf
from tests.ops.test_shared_blocks import Layout
from tests.ops.triton.device import DEVICE, IS_INTERPRETED, MARKS, make_ops, make_world, randn
from tests.ops.triton.test_engine import GREEDY, NUM_TOKENS, load
from tests.ops.world import World, assert_near

from quire.execution.capture.captured_steps import capture_on  # isort: skip - the modules above skip where Triton is missing
from quire.execution.capture.step_capture import CapturedCall  # isort: skip
from quire.execution.capture.tape_capture import TapeCapture  # isort: skip
from quire.ops.triton import launches  # isort: skip
from quire.ops.interface.static_steps import StaticLimits, StaticMemory  # isort: skip
from quire.ops.triton.interpreted_launches import seen_launches  # isort: skip
from quire.ops.triton.linear.stored_experts import StoredExpertLayer  # isort: skip


# Two sequences share 288 tokens, and two others 576.
TWO_PAIRS = [(2, 0, 0, 288), (3, 1, 0, 576)]


def is_decode(item: ScheduledSequence) -> bool:
    return len(item.token_ids) == 1 and item.num_samples == 1 and item.new_sequence is None


def capture(run: Callable[[], object]) -> CapturedCall:
    return capture_on(torch.device(DEVICE)).capture(run)


class TestTwin:
    """What a CUDA graph does not see, the twin does not see either."""

    pytestmark = MARKS

    def test_it_replays_operators_on_the_same_memory(self) -> None:
        x, out = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        call = capture(lambda: out.copy_((x + 1).view(1, 3)[0] * 2))
        x += 4
        call.replay()
        assert out.tolist() == [10.0] * 3

    def test_numbers_of_the_host_stay_those_of_the_capture(self) -> None:
        host, out = [1.0], torch.zeros(2, device=DEVICE)
        call = capture(lambda: out.fill_(host[0]))
        host[0] = 7.0
        out.zero_()
        call.replay()
        assert out.tolist() == [1.0, 1.0]

    def test_kernels_are_launched_again(self) -> None:
        ops, x, out = make_ops(), randn(2, 8), torch.zeros(2, 8, device=DEVICE)
        weight = torch.ones(8, device=DEVICE)
        call = capture(lambda: out.copy_(ops.rms_norm(x, weight, 1e-5)))
        x.copy_(randn(2, 8, seed=1))
        call.replay()
        torch.testing.assert_close(out, torch.rms_norm(x, (8,), None, 1e-5))

    def test_pieces_are_replayed_one_by_one(self) -> None:
        """Between them, others write to static memory; what a piece leaves to the next one lies where it was."""
        x, seam, out = (torch.zeros(3, device=DEVICE) for _ in range(3))

        def run(split: Callable[[], None]) -> None:
            doubled = x * 2
            split()
            out.copy_(doubled + seam)

        first, second = capture_on(torch.device(DEVICE)).capture_pieces(run)
        x += 4
        first.replay()
        x += 100
        seam += 1
        second.replay()
        assert out.tolist() == [9.0] * 3

    @pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1: a capture that fails may spoil CUDA")
    @pytest.mark.parametrize(
        "run",
        [
            lambda x: x.sum().item(),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
            lambda x: x.long().bincount(),
        ],
    )
    def test_what_waits_or_takes_numbers_of_the_host_is_refused(self, run: Any) -> None:
        with pytest.raises(RuntimeError, match="a captured call"):
            TapeCapture(seen_launches).capture(lambda: run(torch.ones(3)))


class TestAttention:
    pytestmark = MARKS

    @pytest.mark.parametrize(
        "options",
        [{}, {"window": 33}, {"chunk": 40}, {"has_sinks": True}, {"stored": "int8"}, {"stored": "fp8"}],
        ids=str,
    )
    def test_one_capture_serves_other_steps(self, options: dict[str, Any]) -> None:
        """Captured on other rows; with one row of padding; contexts in splits, and whole."""
        with torch.inference_mode():
            ops = make_ops()
            for spans in ([(15, 1), (600, 1), (0, 1)], [(30, 1), (31, 1), (32, 1)]):
                world = make_world(spans, head_dim=16, **options)
                world.run(ops)
                kept = world.kv.data.clone()
                q = randn(4, 4, 16)
                expected = ops.step_attention(world.batch, world.kv).attend(1, q[:3], world.scale, world.sinks)
                memory = StaticMemory(torch.device(DEVICE))
                limits = StaticLimits(4, 200)
                window, chunk = options.get("window"), options.get("chunk")
                static = ops.static_tokens(world.kv, window, chunk, memory, limits)
                assert static is not None
                nothing = torch.zeros(0, dtype=torch.int64)
                static.write_tokens(nothing, torch.zeros(1, dtype=torch.int64), nothing, 4)
                memory.upload()
                out = torch.zeros(4, 64, device=DEVICE)

                def attend(static: Any = static, world: World = world, q: torch.Tensor = q, out: Any = out) -> None:
                    step = ops.step_attention(static.batch(4), world.kv)
                    out.copy_(step.attend(1, q, world.scale, world.sinks))

                call = capture(attend)
                world.kv.data.copy_(kept)
                world.kv.data[0].zero_()  # the padding looks at its first slot
                positions = torch.tensor([history for history, _ in spans])
                ids = torch.cat((world.batch.block_ids.cpu(), torch.zeros(1, dtype=torch.int64)))
                static.write_tokens(positions, ids, torch.tensor(world.batch.block_starts[:-1]), 4)
                memory.upload()
                call.replay()
                assert torch.equal(out[:3], expected)
                assert out.isfinite().all()
                assert torch.equal(static.batch(4).slot_mapping[:3], world.batch.slot_mapping)
                assert_near(out[:3], expected)

    @pytest.mark.parametrize("options", [{}, {"window": 640}, {"has_sinks": True}, {"stored": "int8"}], ids=str)
    def test_one_capture_serves_steps_that_share_more_and_less(self, options: dict[str, Any]) -> None:
        """Bit for bit what is launched as it comes; a step that shares nothing is served too."""
        with torch.inference_mode():
            ops, stored = make_ops(), options.get("stored")
            ops.device.launch_bytes = 0  # a GPU does not launch another kernel for what is so little
            window = options.get("window")
            layouts = [
                Layout([(560, 1), (100, 1), (530, 1), (620, 1)], [(2, 0, 0, 512), (3, 0, 0, 512)], 0, window),
                Layout([(300, 1), (620, 1), (300, 1), (600, 1), (580, 1)], TWO_PAIRS, 0, window),
                Layout([(15, 1), (600, 1), (0, 1)], [], 0, window),
            ]
            shape = {"head_dim": 16, "has_sinks": options.get("has_sinks", False), "device": DEVICE}
            worlds = [layout.world(torch.float32, stored, **shape) for layout in layouts]
            for world, is_shared in zip(worlds, (True, True, False), strict=True):
                world.run(ops)
                kept, num_rows = world.kv.data.clone(), len(world.qkv)
                q = randn(8, 4, 16)
                expected = ops.step_attention(world.batch, world.kv).attend(1, q[:num_rows], world.scale, world.sinks)
                memory = StaticMemory(torch.device(DEVICE))
                static = ops.static_tokens(world.kv, window, None, memory, StaticLimits(8, 400))
                assert static is not None
                nothing = torch.zeros(0, dtype=torch.int64)
                static.write_tokens(nothing, torch.zeros(1, dtype=torch.int64), nothing, 8)
                memory.upload()
                outs = [torch.zeros(8, 64, device=DEVICE) for _ in range(2)]

                def attend(
                    shares: bool, static: Any = static, world: World = world, q: Any = q, outs: Any = outs
                ) -> None:
                    step = ops.step_attention(static.batch(8, shares), world.kv)
                    outs[shares].copy_(step.attend(1, q, world.scale, world.sinks))

                calls = [capture(partial(attend, shares)) for shares in (False, True)]
                world.kv.data.copy_(kept)
                world.kv.data[0].zero_()
                positions = torch.tensor([length - 1 for length in world.batch.context_lens])
                ids = torch.cat((world.batch.block_ids.cpu(), torch.zeros(1, dtype=torch.int64)))
                starts = torch.tensor(world.batch.block_starts[:-1])
                assert static.share(positions, ids, starts, range(len(starts))) == is_shared
                for shares in (True, False):
                    static.write_tokens(positions, ids, starts, 8, shares)
                    memory.upload()
                    calls[shares].replay()
                    assert outs[shares].isfinite().all()
                    assert_near(outs[shares][:num_rows], expected, factor=2)
                assert torch.equal(outs[is_shared][:num_rows], expected)

    @pytest.mark.parametrize(("window", "chunk"), [(None, None), (20, None), (None, 24)])
    def test_rows_are_laid_out_as_by_stock_operators(self, window: int | None, chunk: int | None) -> None:
        """Slots, positions, first tokens and first blocks, with padding; tables lie at any places."""
        memory, limits = StaticMemory(torch.device(DEVICE)), StaticLimits(16, 200)
        static = make_ops().static_tokens(make_world([(3, 1)], head_dim=16).kv, window, chunk, memory, limits)
        assert static is not None
        if static._kernels is None:
            pytest.skip("there is no compiled code")
        rng = random.Random(3)
        for num_real in (0, 1, 5, 9):
            positions = torch.tensor([rng.randrange(70) for _ in range(num_real)], dtype=torch.int64)
            starts = torch.tensor([12 * row for row in range(num_real)], dtype=torch.int64)
            ids = torch.randint(1, 1000, (12 * 9 + 1,))
            ids[-1] = 0
            expected = static._lay_by_torch(positions, ids, starts, 10)
            slots = static._slots.host.clone()
            static._slots.host.fill_(-1)
            static.write_tokens(positions, ids, starts, 10)
            assert static._rows is not None
            assert [each.tolist() for each in static._rows[:3]] == [each.tolist() for each in expected[:3]]
            assert static._rows.num_real == num_real
            assert static._slots.host[:10].tolist() == slots[:10].tolist()


class TestEngine:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", sorted(REPRESENTATIVES))
    def test_greedy_tokens(
        self, name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Steps of three, two and one sequences replay those of four and one; outputs are as without captures."""
        reference = make_reference(name, tmp_path_factory)
        sizes = (1, 4)
        llm = load(str(reference.folder), reference.pool_factor, cudagraph_capture_sizes=sizes)
        runner = llm.engine.executor._runner  # type: ignore[attr-defined]
        assert isinstance(runner, ModelRunner)
        assert runner.captured.ladder is not None
        plans: list[StepPlan] = []
        execute = runner.execute

        def execute_seen(plan: StepPlan) -> StepResult:
            plans.append(plan)
            return execute(plan)

        monkeypatch.setattr(runner, "execute", execute_seen)
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            for count in (NUM_TOKENS, NUM_TOKENS - 2, NUM_TOKENS - 1)
        ]
        for _ in range(2):
            found = [
                output.outputs[0].token_ids for output in llm.generate(reference.prompts[:3], params, use_tqdm=False)
            ]
            for tokens, expected in zip(found, reference.outputs, strict=False):
                known = min(len(tokens), len(expected))
                assert list(tokens[:known]) == list(expected[:known])
        # A prompt that ends a step later than the others, as those with states do, is in a step with their decodes.
        decodes = [plan for plan in plans if all(map(is_decode, plan.items))]
        assert runner.captured.num_replayed == len(decodes) >= 2 * (NUM_TOKENS - 2)
        check(llm.engine.scheduler.memory)

    @pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5-moe"])
    def test_experts_of_stored_weights(self, name: str, tmp_path: Path) -> None:
        """Experts of several forms, with biases and beside a shared one; tokens are those of stock operators."""

        def type_of(tensor: str, _shape: tuple[int, ...]) -> GGMLQuantizationType:
            if "exps" not in tensor:
                return GGMLQuantizationType.F32
            if "ffn_down" in tensor:
                return GGMLQuantizationType.Q8_0
            return GGMLQuantizationType.Q5_1 if "ffn_up" in tensor and ".1." in tensor else GGMLQuantizationType.Q4_0

        save_gguf_checkpoint(name, tmp_path)
        path = str(write_gguf(tmp_path, tmp_path / "model.gguf", type_of))
        found = []
        for kernels, options in (("torch", {}), ("triton", {"cudagraph_capture_sizes": (1, 4)})):
            llm = load(path, POOL_FACTORS.get(name, 1), kernels=kernels, **options)
            if kernels == "triton":
                runner = llm.engine.executor._runner  # type: ignore[attr-defined]
                ffns = [layer.ffn for layer in runner._decoder._layers._layers]
                assert all(isinstance(ffn.fused._gate_ups, StoredExpertLayer) for ffn in ffns)
            outputs = llm.generate(ragged_prompts()[:3], GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        assert runner.captured.num_replayed >= NUM_TOKENS - 2
        assert found[0] == found[1]

    @pytest.mark.parametrize("name", ["llama3", "qwen3.5"])
    def test_steps_that_are_launched_ahead(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The tokens of a replayed step are written into the static memory of the next one, which nobody has read.

        They are counted for penalties too; with a bias, which is none, their host reads each before the next step.
        """
        reference = make_reference(name, tmp_path_factory)
        sizes = (1, 4)
        llm = load(str(reference.folder), reference.pool_factor, cudagraph_capture_sizes=sizes, async_scheduling=True)
        runner = llm.engine.executor._runner  # type: ignore[attr-defined]
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            for count in (NUM_TOKENS, NUM_TOKENS - 2, NUM_TOKENS - 1)
        ]
        penalized = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, frequency_penalty=1.5)
        prompts = [*reference.prompts[:3], reference.prompts[0]]
        *found, counted = llm.generate(prompts, [*params, penalized], use_tqdm=False)
        (read,) = llm.generate(prompts[3:], replace(penalized, logit_bias={0: 0.0}), use_tqdm=False)
        assert counted.outputs[0].token_ids == read.outputs[0].token_ids
        for output, expected in zip(found, reference.outputs, strict=False):
            tokens = output.outputs[0].token_ids
            known = min(len(tokens), len(expected))
            assert list(tokens[:known]) == list(expected[:known])
        assert runner.captured.num_replayed >= NUM_TOKENS - 2
        check(llm.engine.scheduler.memory)

    def test_drawn_tokens_of_steps_that_are_launched_ahead(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Draws depend on positions, which a replayed step has in static memory; one sequence ends by a token."""
        folder = str(save_checkpoint("llama3", tmp_path_factory.mktemp("drawn")))
        params = [
            SamplingParams(temperature=1.3, max_tokens=count, ignore_eos=True, seed=count) for count in (9, 12, 20)
        ]
        found: list[Any] = []
        for options in ({"enforce_eager": True}, {"cudagraph_capture_sizes": (1, 4), "async_scheduling": True}):
            llm = load(folder, **options)
            if found:  # the host learns of this end a step late
                params[1] = replace(params[1], stop_token_ids=(found[0][1][5],))
            outputs = llm.generate(ragged_prompts()[:3], params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
        assert llm.engine.executor._runner.captured.num_replayed > 10  # type: ignore[attr-defined]
        first = found[0][1].index(found[0][1][5])
        assert found[1] == [found[0][0], found[0][1][: first + 1], found[0][2]]

    def test_more_sequences_than_the_largest_size(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        reference = make_reference("llama3", tmp_path_factory)
        llm = load(str(reference.folder), cudagraph_capture_sizes=[2])
        found = llm.generate(reference.prompts[:3], GREEDY, use_tqdm=False)
        for output, expected in zip(found, reference.outputs, strict=False):
            tokens = output.outputs[0].token_ids
            known = min(len(tokens), len(expected))
            assert list(tokens[:known]) == list(expected[:known])

    def test_sequences_that_share_a_prompt(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What they share is read once, in steps that are replayed and in others; the tokens are those of torch."""
        monkeypatch.setattr(launches, "LAUNCH_BYTES", 0)  # a GPU does not launch another kernel for what is so little
        folder = str(save_checkpoint("llama3", tmp_path_factory.mktemp("shared")))
        rng = random.Random(7)
        common = [rng.randrange(10, VOCAB_SIZE) for _ in range(270)]
        prompts = [common + [rng.randrange(10, VOCAB_SIZE) for _ in range(3 + idx)] for idx in range(3)]
        options: dict[str, Any] = {"max_model_len": 300, "num_kv_blocks": 120}
        outputs, replayed = [], 0
        for kernels, sizes in (("torch", None), ("triton", (1, 2, 4)), ("triton", None)):
            captured = {} if sizes is None else {"cudagraph_capture_sizes": sizes}
            llm = load(folder, kernels=kernels, **(options | captured))
            llm.generate([common[:264]], SamplingParams(max_tokens=1), use_tqdm=False)
            if sizes is not None:
                ladder = llm.engine.executor._runner.captured.ladder  # type: ignore[attr-defined]
                assert [step.size for step in ladder._sharing_steps] == [2, 4]
                for step in ladder._sharing_steps:

                    def replay(call: Any = step._call) -> None:
                        nonlocal replayed
                        replayed += 1
                        call.replay()

                    step._call = SimpleNamespace(replay=replay)
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
        assert outputs[1] == outputs[0]
        assert outputs[2] == outputs[0]
        assert replayed >= NUM_TOKENS - 2
