"""Ranks that each have a part of a model compute what one process does, for every family."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.causal_model import CausalModel
from quire.models.specs.sharding import Share, shard_spec, splits_of
from quire.models.specs.spec import Attention, LayerSpec
from tests.conformance.checkpoints import FAMILIES, UNSHARED, save_checkpoint
from tests.distributed.in_threads import run_ranks
from tests.models.tiny import PagedRun, random_tokens

# One family of each kind of layer in the default run: dense and tied, windows and shared caches, experts, both kinds of
# recurrent layers beside attention, and mixers side by side.
REPRESENTATIVES = frozenset({"llama3", "gemma4", "gpt-oss", "qwen3.5", "lfm2", "falcon-h1"})
NAMES = [
    pytest.param(name, marks=[] if name in REPRESENTATIVES else pytest.mark.slow)
    for name in sorted({*FAMILIES} - UNSHARED)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to the folder of its checkpoint, which is made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


class RankedRun(PagedRun):
    """The steps of a rank: rank 0 has logits, the others serve the head meanwhile."""

    def __init__(self, decoder: CausalModel, group: RankGroup) -> None:
        super().__init__(decoder)
        self._group = group
        logits, serve_head = decoder.logits, decoder.serve_head

        def ranked(hidden: torch.Tensor) -> torch.Tensor:
            if group.rank == 0:
                likeliest = decoder.likeliest(hidden)
                found = logits(hidden)
                assert likeliest is not None
                assert all(map(torch.equal, likeliest, found.max(-1)))
                group.send_commands(b"results")
                return found
            serve_head()
            assert group.receive_commands() == b"results"
            return hidden

        decoder.logits = ranked  # type: ignore[method-assign]


def steps(run: PagedRun) -> list[torch.Tensor]:
    """Run a prompt in chunks beside others, then decode; return the logits of each step."""
    tokens = random_tokens(40), random_tokens(17, 1), random_tokens(3, 2)
    found: list[torch.Tensor] = []
    for rows in (
        {0: tokens[0][:20]},
        {0: tokens[0][20:], 1: tokens[1]},
        {0: [5], 1: [9], 2: tokens[2]},
        *({0: [idx], 1: [idx + 1], 2: [idx + 2]} for idx in range(10, 14)),
    ):
        found += run.step({seq_id: [token % 199 for token in part] for seq_id, part in rows.items()}).values()
    return found


def ranked_steps(
    folder: Path, size: int, dtype: torch.dtype = torch.float32, *, by_expert: bool = False, **options: Any
) -> list[torch.Tensor]:
    """Return the logits of ranks that share a checkpoint."""

    def body(group: RankGroup) -> list[torch.Tensor]:
        group.divides_experts = by_expert
        decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=dtype, ranks=group, **options)
        return steps(RankedRun(decoder, group))

    return run_ranks(size, body)[0]


def whole_steps(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    decoder = load_decoder(Checkpoint.open(str(folder)), device="cpu", dtype=dtype, **options)
    return steps(PagedRun(decoder))


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_logits_of_one_process(name: str, folders: Any) -> None:
    assert_near(ranked_steps(folders(name), 2), whole_steps(folders(name)), 3e-5)


@pytest.mark.parametrize(("name", "size"), [("qwen3", 4), pytest.param("llama2", 4, marks=pytest.mark.slow)])
def test_more_ranks_than_kv_heads(name: str, size: int, folders: Any) -> None:
    assert_near(ranked_steps(folders(name), size), whole_steps(folders(name)), 3e-5)


EXPERTS = ("gpt-oss", "qwen3.5-moe", "llama4", "gemma4-moe", "granite4-moe", "lfm2-moe")


# Experts with biases in rows that alternate, then with a shared one, in transposed matrices, and beside an MLP.
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in EXPERTS[:1] else pytest.mark.slow) for each in EXPERTS]
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_ranks_with_whole_experts(name: str, kernels: str, folders: Any) -> None:
    found = ranked_steps(folders(name), 2, by_expert=True, kernels=kernels)
    assert_near(found, whole_steps(folders(name), kernels=kernels), 3e-5)


def test_fused_layers_with_whole_experts(folders: Any) -> None:
    """bfloat16: experts are one native call; both err as the whole model's rounding does."""
    folder = folders("gpt-oss")
    exact, whole = whole_steps(folder), whole_steps(folder, torch.bfloat16)
    ranked = ranked_steps(folder, 2, torch.bfloat16, by_expert=True)
    for one, other, expected in zip(ranked, whole, exact, strict=True):
        ours, theirs = ((logits - expected).square().mean().sqrt() for logits in (one, other))
        assert ours < 1.5 * theirs + 0.01 * expected.std()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_fused_layers_sum_over_ranks(quantization: Any, folders: Any) -> None:
    """bfloat16: decode steps are one native call, prompts are not; both err as the whole model's rounding does."""
    folder = folders("llama3")
    exact = whole_steps(folder)
    whole = whole_steps(folder, torch.bfloat16, quantization=quantization)
    ranked = ranked_steps(folder, 2, torch.bfloat16, quantization=quantization)
    for one, other, expected in zip(ranked, whole, exact, strict=True):
        ours, theirs = ((logits - expected).square().mean().sqrt() for logits in (one, other))
        assert ours < 1.5 * theirs + 0.01 * expected.std()


def test_parts_of_ranks_are_the_whole(folders: Any) -> None:
    """Every row and column is on one rank, but for norms, routers, and KV heads that several ranks need."""
    checkpoint = Checkpoint.open(str(folders("llama3")))
    spec, _ = build(checkpoint.config)
    size = 2
    for name, split in splits_of(spec, Share(0, size)).items():
        if split.dim is None:
            continue
        ranges = sorted(each for rank in range(size) for each in splits_of(spec, Share(rank, size))[name].ranges)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == split.length
        assert all(before[1] == after[0] for before, after in pairwise(ranges)), name


@pytest.mark.parametrize("vocab_size", [5, 199, 151936, 32000])
def test_the_vocabulary_is_divided(vocab_size: int) -> None:
    for size in (1, 2, 3, 4, 5):
        ranges = [Share(rank, size).vocabulary(vocab_size) for rank in range(size)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == vocab_size
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert Share(0, size).widths(vocab_size) == [end - first for first, end in ranges]
        assert all(end > first for first, end in ranges)


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("llama3", 3, "4 query heads of layer 0"),
        ("granite4", 4, "groups of heads, each of which is normed whole"),
        ("llama3", 8, "4 query heads"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(name: str, size: int, what: str, folders: Any) -> None:
    spec, _ = build(Checkpoint.open(str(folders(name))).config)
    with pytest.raises(ConfigError, match=what) as refused:
        shard_spec(spec, Share(0, size))
    assert refused.value.field == "tensor_parallel_size"
    assert f"got {size}" in str(refused.value)


def test_experts_that_ranks_cannot_divide_are_refused(folders: Any) -> None:
    spec, _ = build(Checkpoint.open(str(folders("gpt-oss"))).config)
    with pytest.raises(ConfigError, match="must divide the 4 experts of layer 0, got 3") as refused:
        shard_spec(replace(spec, layers=tuple(map(without_heads, spec.layers))), Share(0, 3, by_expert=True))
    assert refused.value.field == "tensor_parallel_size"


def without_heads(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose heads three ranks can divide."""
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, num_heads=3, num_kv_heads=3))


def test_kv_heads_that_ranks_cannot_divide_are_refused(folders: Any) -> None:
    spec, _ = build(Checkpoint.open(str(folders("llama2"))).config)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    layer = replace(spec.layers[0], mixer=replace(mixer, num_heads=12, num_kv_heads=3))
    with pytest.raises(ConfigError, match="3 KV heads of layer 0, got 2"):
        shard_spec(replace(spec, layers=(layer,)), Share(0, 2))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("int4", "llama3"),
        pytest.param("int8", "qwen3", marks=pytest.mark.slow),
        pytest.param("q8_0", "bundled", marks=pytest.mark.slow),
        pytest.param("q4_0", "bundled", marks=pytest.mark.slow),
    ],
)
def test_stored_quantised_weights_are_divided_between_groups(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = name, tmp_path / "out"
    if name != "bundled":
        model = str(save_checkpoint(name, tmp_path / "plain", intermediate_size=128, head_dim=32))
    if form.startswith("q"):
        out = tmp_path / "out.gguf"
    quantize(model, out, QuantizeOptions(form, method="rounded"))
    # Float32 sums of ranks differ in the last bits, which may decide between two codes of int8: without these, no more.
    monkeypatch.setattr("quire.ops.pytorch.torch_quantised.rounded_rows", lambda rows, _: rows)
    assert_near(ranked_steps(out, 2, kernels="torch"), whole_steps(out, kernels="torch"), 3e-5)


def test_groups_that_ranks_would_divide_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint("llama3", tmp_path / "plain", intermediate_size=96)
    quantize(str(folder), tmp_path / "out", QuantizeOptions("int4", method="rounded"))
    with pytest.raises(ConfigError, match=r"cannot split layers\.0\.ffn\.down\.weight.*share scales across ranks"):
        ranked_steps(tmp_path / "out", 2)
