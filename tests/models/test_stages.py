"""A model in stages computes what one process does, for every family; and how layers are divided."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.distributed.pipeline import PipelineGroup
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.stages import StageDecoder
from quire.models.specs.parameter_estimate import layer_parameters
from quire.models.specs.sharding import Share, splits_of
from quire.models.specs.spec import Attention, GatedMLP, LayerSpec, ModelSpec, RMSNorm
from quire.models.specs.stage_spec import ELSEWHERE, divide, most_stages, stage_spec, stage_weights
from tests.conformance.checkpoints import FAMILIES, UNSHARED, save_checkpoint
from tests.conformance.conftest import slow_or_exhaustive
from tests.distributed.in_threads import run_groups
from tests.distributed.test_pipeline import make_stages
from tests.models.test_sharding import REPRESENTATIVES, RankedRun, ranked_steps, steps, whole_steps
from tests.models.tiny import PagedRun

NORM = RMSNorm(1e-6)
NAMES = [
    pytest.param(name, marks=[] if name in REPRESENTATIVES else pytest.mark.slow)
    for name in sorted({*FAMILIES} - UNSHARED)
]
# Layers that read other layers' caches and have inputs of their own, and recurrent ones.
RUN = ("gemma4", "qwen3.5")
# The tiny checkpoint of one family cannot be cut: a layer reads the cache of one before.
UNCUT = {"gemma4-moe"} | UNSHARED
RUN_NAMES = [pytest.param(name, marks=[] if name in RUN else pytest.mark.slow) for name in sorted({*FAMILIES} - UNCUT)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to the folder of its checkpoint, which is made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def spec_of(folder: Path) -> ModelSpec:
    return build(Checkpoint.open(str(folder)).config)[0]


def staged_run(decoder: CausalModel, group: PipelineGroup) -> PagedRun:
    """Return the steps of a rank of a stage: rank 0 has logits."""
    assert isinstance(decoder, StageDecoder)
    if group.tensor is not None:
        return RankedRun(decoder, group)
    if decoder.is_follower:
        decoder.logits = lambda hidden: hidden  # type: ignore[method-assign]
    return PagedRun(decoder)


def staged_steps(
    folder: Path,
    size: int,
    dtype: torch.dtype = torch.float32,
    *,
    tensor_size: int = 1,
    by_expert: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Return the logits of a model in stages, each of which some ranks share."""

    def body(group: PipelineGroup) -> list[torch.Tensor]:
        decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=dtype, ranks=group, **options)
        return steps(staged_run(decoder, group))

    sizes: dict[str, Any] = {"tensor_parallel_size": tensor_size, "enable_expert_parallel": by_expert}
    return run_groups(make_stages(size, **sizes), body)[0]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", RUN_NAMES)
def test_stages_have_the_bits_of_one_process(name: str, folders: Any) -> None:
    folder = folders(name)
    size = most_stages(spec_of(folder))
    assert size > 1
    expected = whole_steps(folder)
    for count in {2, size}:
        assert_equal(staged_steps(folder, count), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=slow_or_exhaustive(each, {"gemma4"})) for each in sorted({*FAMILIES} - UNCUT)]
)
def test_stages_of_two_ranks_have_the_bits_of_two_ranks(name: str, folders: Any) -> None:
    folder = folders(name)
    size = most_stages(spec_of(folder))
    expected = ranked_steps(folder, 2)
    for count in {2, size}:
        assert_equal(staged_steps(folder, count, tensor_size=2), expected)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=slow_or_exhaustive(each, {"gpt-oss"})) for each in ("gpt-oss", "llama4", "lfm2-moe")],
)
def test_stages_of_ranks_with_whole_experts(name: str, folders: Any) -> None:
    folder = folders(name)
    found = staged_steps(folder, 2, tensor_size=2, by_expert=True)
    assert_equal(found, ranked_steps(folder, 2, by_expert=True))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_fused_layers_in_stages_of_ranks(quantization: Any, folders: Any) -> None:
    """bfloat16: the layers of a stage are one native call in decode steps, with the sums of its ranks."""
    options, folder = {"quantization": quantization}, folders("llama3")
    found = staged_steps(folder, 2, torch.bfloat16, tensor_size=2, **options)
    assert_equal(found, ranked_steps(folder, 2, torch.bfloat16, **options))


@pytest.mark.parametrize("quantization", [None, "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_stages_in_bfloat16(quantization: Any, folders: Any) -> None:
    options = {"quantization": quantization}
    folder = folders("llama3")
    assert_equal(staged_steps(folder, 2, torch.bfloat16, **options), whole_steps(folder, torch.bfloat16, **options))


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_stages_without_native_kernels(kernels: str, folders: Any) -> None:
    """A tied matrix is two tensors there."""
    folder = folders("qwen3")
    assert_equal(staged_steps(folder, 2, kernels=kernels), whole_steps(folder, kernels=kernels))


@pytest.mark.slow
def test_stages_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    quantize("bundled", tmp_path / "out.gguf", QuantizeOptions("q8_0", method="rounded"))
    assert_equal(staged_steps(tmp_path / "out.gguf", 3), whole_steps(tmp_path / "out.gguf"))


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_where_it_is_needed(name: str, folders: Any) -> None:
    spec, weight_map = build(Checkpoint.open(str(folders(name))).config)
    for size in range(1, most_stages(spec) + 1):
        stages = divide(spec, size)
        assert [stage.first for stage in stages] == [0, *(stage.end for stage in stages[:-1])]
        assert stages[-1].end == len(spec.layers)
        places: dict[tuple[str, ...], list[int]] = {}
        for stage in stages:
            own_map, _ = stage_weights(spec, stage, weight_map)
            assert len(own_map) == len(weight_map)
            for weight, sources in own_map.items():
                if not weight.startswith(ELSEWHERE) and stage.has(weight, is_tied=spec.tied_head):
                    places.setdefault((weight.split(".")[0], *sources), []).append(stage.idx)
        for (part, *_), idxs in places.items():
            wanted = {"norm": [size - 1], "head": [size - 1], "per_layer_inputs": list(range(size))}
            wanted["embedding"] = [0, size - 1] if spec.tied_head and size > 1 else [0]
            assert idxs == wanted.get(part, idxs[:1])
        assert len(places) == len({(name.split(".")[0], *sources) for name, sources in weight_map.items()})


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_of_a_stage_reads_its_own_part(name: str, folders: Any) -> None:
    """A stage reads of its layers what a tensor parallel rank of the whole model reads of them, and nothing more."""
    spec, weight_map = build(Checkpoint.open(str(folders(name))).config)
    shares = splits_of(spec, Share(1, 2))
    for stage in divide(spec, most_stages(spec)):
        _, splits = stage_weights(spec, stage, weight_map, shares)
        for idx in range(stage.first, stage.end):
            whole, own = f"layers.{idx}.", f"layers.{idx - stage.first}."
            wanted = {own + key.removeprefix(whole): split for key, split in shares.items() if key.startswith(whole)}
            assert {key: split for key, split in splits.items() if key.startswith(own)} == wanted
        assert splits["embedding.weight"] == shares["embedding.weight"]
        if spec.per_layer_inputs is not None:
            name_of_table = "per_layer_inputs.embedding.weight"
            split, width = splits[name_of_table], spec.per_layer_inputs.width
            table = torch.arange(spec.per_layer_inputs.vocab_size)[:, None] * 1000 + torch.arange(split.length)
            (first, end), columns = shares[name_of_table].ranges[0], slice(stage.first * width, stage.end * width)
            (cut,) = split.cut([table], name_of_table)
            assert isinstance(cut, torch.Tensor)
            assert torch.equal(cut, table[first:end, columns])
            assert split.whole_shape(tuple(cut.shape)) == table.shape


@pytest.mark.parametrize("name", NAMES)
def test_block_tables_have_the_same_groups_on_all_stages(name: str, folders: Any) -> None:
    spec = spec_of(folders(name))
    for size in range(1, most_stages(spec) + 1):
        stages = divide(spec, size)
        parts = [stage_spec(spec, stages, idx) for idx in range(size)]
        groups = {part.cache_groups for part in parts}
        assert len(groups) == 1
        (found,) = groups
        assert [group.cache for group in found] == [group.cache for group in spec.cache_groups]
        for part in parts:
            for layer, positions in zip(part.layers, part.cache_positions, strict=True):
                for mixer, (group_idx, layer_idx) in zip(layer.parts, positions, strict=True):
                    assert 0 <= layer_idx < found[group_idx].num_layers
                    assert mixer.cache in (None, found[group_idx].cache)
        # Of each group some stage has as many layers as a block holds.
        for idx, group in enumerate(found):
            used = [{pos for each in part.cache_positions for pos in each if pos[0] == idx} for part in parts]
            assert max(map(len, used)) == group.num_layers


def layers_of(widths: list[int], sources: dict[int, int]) -> tuple[LayerSpec, ...]:
    """Return layers of some widths, of which some read the cache of others."""
    return tuple(
        LayerSpec(NORM, Attention(2, 1, 8, None, source=sources.get(idx)), GatedMLP(width))
        for idx, width in enumerate(widths)
    )


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    """Beside all divisions, for layers of random widths and random readers of other layers' caches."""
    rng = random.Random(3)
    for _ in range(60):
        count = rng.randrange(1, 8)
        sources: dict[int, int] = {}
        for idx in range(1, count):
            owners = [owner for owner in range(idx) if owner not in sources]
            if rng.random() < 0.3:
                sources[idx] = rng.choice(owners)
        layers = layers_of([rng.randrange(1, 60) for _ in range(count)], sources)
        spec = ModelSpec(rng.randrange(2, 40), 16, layers, NORM, rng.random() < 0.5, 64)
        for size in range(1, count + 1):
            possible = [
                largest(spec, (0, *cuts, count))
                for cuts in combinations(range(1, count), size - 1)
                if all(not (owner < cut <= reader) for cut in cuts for reader, owner in sources.items())
            ]
            assert bool(possible) == (size <= most_stages(spec))
            if not possible:
                with pytest.raises(ConfigError, match=f"got {size}: the model has {count} layers") as refused:
                    divide(spec, size)
                assert refused.value.field == "pipeline_parallel_size"
                continue
            stages = divide(spec, size)
            cuts = (0, *(stage.end for stage in stages))
            assert all(not (owner < cut <= reader) for cut in cuts for reader, owner in sources.items())
            assert largest(spec, cuts) == min(possible)


def largest(spec: ModelSpec, cuts: tuple[int, ...]) -> int:
    """Return the parameters that a step reads on the stage with most of them."""
    sizes = [sum(layer_parameters(layer, spec.width) for layer in spec.layers[a:b]) for a, b in pairwise(cuts)]
    return max(*sizes[:-1], sizes[-1] + spec.vocab_size * spec.width, 0)


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    spec = ModelSpec(10, 16, layers_of([32] * 8, {}), NORM, True, 64)
    assert [stage.end - stage.first for stage in divide(spec, 2)] == [4, 4]
    large = replace(spec, vocab_size=2 * layer_parameters(spec.layers[0], 16) // 16)
    assert [stage.end - stage.first for stage in divide(large, 2)] == [5, 3]


def test_a_step_whose_hidden_states_are_too_large_is_refused(folders: Any) -> None:
    def body(group: PipelineGroup) -> None:
        decoder = load_decoder(Checkpoint.open(str(folders("llama3"))), device="cpu", dtype=torch.float32, ranks=group)
        assert isinstance(decoder, StageDecoder)
        limit = (1 << 28) // (4 * decoder.spec.width)
        decoder.check_step(limit)
        with pytest.raises(ConfigError, match=f"at most {limit} .* got {limit + 1}") as refused:
            decoder.check_step(limit + 1)
        assert refused.value.field == "max_num_batched_tokens"

    run_groups(make_stages(2), body)
