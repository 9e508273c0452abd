"""Layers that run as one call, under every history: hidden states and caches have the bits of the layers one by one.

Each such step of an engine is run a second time, layer by layer, and stores in the same slots. So hidden states are
compared bit by bit, and so is all memory after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.memory import check
from quire.models.checkpoints.checkpoint import locate
from quire.models.modules.decoder import Decoder
from quire.ops.cpu.native_layers import NativeLayers
from quire.ops.cpu.native_library import MAX_ROWS, find_library
from tests.conformance.checkpoints import FAMILIES, ragged_prompts, save_checkpoint

# Families of attention and gated perceptrons alone.
DENSE = ("bundled", "llama2", "llama3", "mistral", "mistral-window", "phi3", "qwen2", "qwen2-window", "qwen3")
# And those with gates of attention, gated delta nets, short convolutions, or experts.
FUSED = (*DENSE, "glm4-moe", "gpt-oss", "lfm2", "lfm2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe")
# Weights that were trained, a window, and states beside experts; the others under every history are slow.
REPRESENTATIVES = ("bundled", "mistral-window", "qwen3.5-moe")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

pytestmark = pytest.mark.skipif(isinstance(find_library(), str), reason="no native kernels were built")


class Net:
    """Watches all decoders of a process.

    Attributes:
        fused: the rows and the sequences of each step whose layers ran as one call.
        seen: the decoders.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fused: list[tuple[int, int]] = []
        self.seen: list[Decoder] = []
        self.is_off = False
        run, call = NativeLayers.__call__, Decoder.__call__

        def counted(layers: NativeLayers, x: Any, rotations: Any, groups: Any, storages: Any) -> Any:
            hidden = None if self.is_off else run(layers, x, rotations, groups, storages)
            if hidden is not None:
                self.fused.append((len(x), len(groups[0].row_starts) - 1))
            return hidden

        def checked(
            decoder: Decoder, input_ids: Any, positions: Any, groups: Any, storages: Any, *args: Any, **options: Any
        ) -> Any:
            if decoder not in self.seen:
                self.seen.append(decoder)
            num_fused, before = len(self.fused), contents(storages)
            hidden = call(decoder, input_ids, positions, groups, storages, *args, **options)
            if len(self.fused) > num_fused:
                stored, found = contents(storages), hidden.clone()
                for storage, content in zip(storages, before, strict=True):
                    storage.data.view(torch.uint8).copy_(content)  # states have moved on
                self.is_off = True
                assert torch.equal(call(decoder, input_ids, positions, groups, storages, *args, **options), found)
                self.is_off = False
                assert all(map(torch.equal, contents(storages), stored))
                assert torch.equal(hidden, found)
            return hidden

        monkeypatch.setattr(NativeLayers, "__call__", counted)
        monkeypatch.setattr(Decoder, "__call__", checked)

    def run(self, llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
        """Return the tokens of all samples; see that layers ran as one call."""
        self.fused.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check(llm.engine.scheduler.memory)
        assert self.fused
        return [[sample.token_ids for sample in output.outputs] for output in outputs]


def contents(storages: Sequence[Any]) -> list[torch.Tensor]:
    return [storage.data.view(torch.uint8).clone() for storage in storages]


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    return Net(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a family to its checkpoint, which is made once."""
    return cache(
        lambda name: locate(name) if name == "bundled" else save_checkpoint(name, tmp_path_factory.mktemp(name))
    )


def cases(families: Sequence[str], default: Sequence[str] = REPRESENTATIVES) -> list[Any]:
    return [pytest.param(name, marks=[] if name in default else pytest.mark.slow) for name in families]


@pytest.fixture(params=cases(FUSED))
def folder(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Path:
    return folders(request.param)


@pytest.fixture
def few_blocks(request: pytest.FixtureRequest) -> int:
    """Return a number of blocks that preempts sequences; states in float32 take many blocks of so small a cache."""
    return {"lfm2": 24, "lfm2-moe": 24, "qwen3-next": 64, "qwen3.5": 64, "qwen3.5-moe": 64}.get(
        request.node.callspec.params["folder"], 12
    )


def load(folder: Path, **options: Any) -> LLM:
    """Load a checkpoint in the dtype whose products are kernels."""
    defaults = {"skip_tokenizer_init": True, "dtype": "bfloat16", "num_threads": 1, "max_model_len": 128}
    return LLM(str(folder), **defaults | {"block_size": 8, "num_kv_blocks": 200} | options)


@pytest.mark.parametrize("name", cases([*FAMILIES, "bundled"], [*REPRESENTATIVES, "gemma4"]))
def test_which_families_are_fused(folders: Callable[[str], Path], net: Net, name: str) -> None:
    llm = load(folders(name), num_kv_blocks=1000)
    llm.generate(ragged_prompts()[:2], GREEDY, use_tqdm=False)
    assert bool(net.fused) == (name in FUSED)


def test_sequences_join_and_leave(folder: Path, net: Net) -> None:
    llm = load(folder, max_num_seqs=8, max_num_batched_tokens=24)
    params = [SamplingParams(temperature=0.0, max_tokens=5 + 4 * idx, ignore_eos=True) for idx in range(7)]
    engine = llm.engine
    for idx, (prompt, each) in enumerate(zip(ragged_prompts()[:7], params, strict=True)):
        engine.add_request(str(idx), prompt, each)
        for _ in range(3):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    check(engine.scheduler.memory)
    assert len({rows for rows, _ in net.fused}) > 3


def test_batches_of_all_sizes(folder: Path, net: Net) -> None:
    llm = load(folder, num_kv_blocks=600)
    prompt = max(ragged_prompts(), key=len)
    for count in range(1, MAX_ROWS + 2):
        prompts = [[*prompt[: 7 + idx], idx] for idx in range(count)]
        if count <= MAX_ROWS:
            net.run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        else:
            net.fused.clear()
            llm.generate(prompts, GREEDY, use_tqdm=False)
            assert all(rows <= MAX_ROWS for rows, _ in net.fused)
        assert count > MAX_ROWS or (count, count) in net.fused


def test_preempted_and_recomputed(folder: Path, net: Net, few_blocks: int) -> None:
    llm = load(folder, num_kv_blocks=few_blocks, max_model_len=96)
    net.run(llm, ragged_prompts())
    assert llm.stats.num_preemptions > 0


def test_swapped_out_and_in(folder: Path, net: Net, few_blocks: int) -> None:
    llm = load(folder, num_kv_blocks=few_blocks, max_model_len=96, swap_space=8 << 20, preemption_mode="swap")
    net.run(llm, ragged_prompts())
    assert llm.stats.num_swaps > 0


def test_forked(folder: Path, net: Net) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, n=3)
    llm = load(folder)
    tokens = net.run(llm, ragged_prompts()[:4], params)
    assert llm.stats.num_copies > 0
    assert any(first != second for first, second, _ in tokens)


def test_beams(folder: Path, net: Net) -> None:
    net.run(load(folder), ragged_prompts()[:3], SamplingParams(beam_width=4, n=4, max_tokens=16))


@pytest.mark.parametrize("folder", cases(DENSE), indirect=True)
def test_drafts(folder: Path, net: Net) -> None:
    """Steps of now several rows a sequence, now one; random weights of the other families repeat nothing."""
    pattern = ragged_prompts()[1][:4] * 8
    llm = load(folder, speculative_method="ngram", num_speculative_tokens=3)
    llm.engine.step_recorder.speculation = None
    net.run(llm, [pattern, pattern[:-1], pattern[2:]])
    assert llm.stats.num_draft_tokens > 0


def test_a_draft_model_is_fused_too(folder: Path, net: Net) -> None:
    llm = load(folder, speculative_method="draft", draft_model=str(folder), num_speculative_tokens=3)
    llm.engine.step_recorder.speculation = None
    speculation: Any = llm.engine.scheduler.drafter
    speculation.step_costs = [1.0] * 4
    net.run(llm, ragged_prompts()[:3])
    assert any(rows > sequences for rows, sequences in net.fused)
    assert len(net.seen) == 2


def test_log_probabilities_of_prompts(folder: Path, net: Net) -> None:
    """They read hidden states once more, behind the sampled rows'."""
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    llm = load(folder, **options)
    prompts = ragged_prompts()[:3]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert net.fused
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [*map(len, prompts)]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
        {"quantization": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "int8"},
        {"quantization": "int8", "dtype": "float32"},
        {"weight_packing": "plain"},
        {"dtype": "float16"},
        {"num_threads": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_form_of_weights_and_cache(folders: Callable[[str], Path], net: Net, options: dict[str, Any]) -> None:
    library = find_library()
    if options.get("dtype") == "float16" and (isinstance(library, str) or torch.float16 not in library.packed_types):
        pytest.skip("torch multiplies float16 here")
    for name in ("qwen3", "qwen2-window"):
        llm = load(folders(name), **options)
        prompts = ragged_prompts()
        tokens = net.run(llm, prompts)
        if "deterministic" in options:
            assert tokens == [net.run(llm, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"kv_cache_dtype": "fp8"}], ids=["products", "attention"])
def test_what_torch_computes_is_not_fused(folders: Callable[[str], Path], net: Net, options: dict[str, Any]) -> None:
    llm = load(folders("qwen3"), **options)
    llm.generate(ragged_prompts(), GREEDY, use_tqdm=False)
    assert net.seen
    assert not net.fused
