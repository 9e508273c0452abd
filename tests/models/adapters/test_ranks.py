"""Adapters of a model that ranks share: parts give what whole ones do; and folders that ranks do not share."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.distributed.links import RankLinks
from quire.distributed.pipeline import PipelineGroup
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import RankCalls, answer_calls
from quire.engine.startup.ranked_adapters import FollowerSlots, LeaderSlots
from quire.errors import CheckpointError, LockstepDrift
from quire.models.adapters.slots import AdapterSlots
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.columns import with_rows
from quire.models.loading.loading import load_decoder, make_adapter_slots
from quire.models.modules.causal_model import CausalModel
from tests.conformance.checkpoints import FAMILIES, UNSHARED, save_checkpoint
from tests.conformance.conftest import slow_or_exhaustive
from tests.distributed.in_threads import run_groups, run_ranks
from tests.distributed.test_pipeline import make_stages
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.models.test_sharding import RankedRun, assert_near, steps
from tests.models.test_stages import UNCUT, assert_equal, staged_run
from tests.models.tiny import PagedRun

MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "in_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3", "in_proj_qkv", "in_proj_z", "shared_expert_gate", "c_attn", "c_fc", "c_proj"),
)
# Heads in another order and gated beside a shared expert, heads that ranks share, states beside attention.
NAMES = [
    "llama3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*FAMILIES} - UNSHARED - {"llama3"})),
]
# Attention alone; and in the slow run, layers with inputs of their own. In `tests/conformance`, experts and states.
CUT = [
    pytest.param(name, marks=[] if name == "llama3" else slow_or_exhaustive(name, {"gemma4"}))
    for name in sorted({*FAMILIES} - UNCUT)
]


class World(NamedTuple):
    """A checkpoint, and an adapter of all linear layers of its layers but single experts'."""

    checkpoint: Checkpoint
    adapter: Path


def make_world(folder: Path, name: str) -> World:
    checkpoint = Checkpoint.open(str(save_checkpoint(name, folder / "model")))
    widths = {
        stored.removesuffix(".weight"): tensor.shape
        for stored, tensor in with_rows(checkpoint).tensors.items()
        if stored.removesuffix(".weight").endswith(MODULES) and len(tensor.shape) == 2 and ".experts." not in stored
    }
    return World(checkpoint, write_adapter(folder / "adapter", random_matrices(widths, 4, 1)))  # type: ignore[arg-type]


def run_of(decoder: CausalModel, group: RankGroup | None) -> PagedRun:
    if group is None:
        return PagedRun(decoder)
    return staged_run(decoder, group) if isinstance(group, PipelineGroup) else RankedRun(decoder, group)


def staged(body: Callable[[RankGroup], list[torch.Tensor]], tensor_size: int) -> list[torch.Tensor]:
    """Return what rank 0 has of two stages, of some ranks each."""
    return run_groups(make_stages(2, tensor_parallel_size=tensor_size), body)[0]


def adapted_steps(
    world: World, group: RankGroup | None = None, dtype: torch.dtype = torch.float32, *, is_on: bool = True
) -> list[torch.Tensor]:
    decoder = load_decoder(world.checkpoint, device="cpu", dtype=dtype, ranks=group)
    slots = make_adapter_slots(world.checkpoint, decoder, 16, group)
    slots.put(3, slots.read(world.adapter))
    run = run_of(decoder, group)
    run.adapter = 3 if is_on else None
    return steps(run)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_cut_as_weights_are(name: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, name)
    whole = adapted_steps(world)
    assert_near(run_ranks(2, lambda group: adapted_steps(world, group))[0], whole, 3e-5)
    assert not torch.allclose(whole[-1], adapted_steps(world, is_on=False)[-1], atol=0.1)


@pytest.mark.parametrize("name", CUT)
def test_stages_have_the_matrices_of_their_layers(name: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, name)
    assert_equal(staged(lambda group: adapted_steps(world, group), 1), adapted_steps(world))
    ranked = run_ranks(2, lambda group: adapted_steps(world, group))[0]
    assert_equal(staged(lambda group: adapted_steps(world, group), 2), ranked)


@pytest.mark.slow
def test_fused_layers_have_adapters_on_stages(tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama3")
    whole = adapted_steps(world, dtype=torch.bfloat16)
    assert_equal(staged(lambda group: adapted_steps(world, group, torch.bfloat16), 1), whole)


def test_fused_layers_have_adapters_on_ranks(tmp_path: Path) -> None:
    """bfloat16: decode steps are one native call; both err as the whole model's rounding does."""
    world = make_world(tmp_path, "llama3")
    exact, whole = adapted_steps(world), adapted_steps(world, dtype=torch.bfloat16)
    ranked = run_ranks(2, lambda group: adapted_steps(world, group, torch.bfloat16))[0]
    for one, other, expected in zip(ranked, whole, exact, strict=True):
        ours, theirs = ((logits - expected).square().mean().sqrt() for logits in (one, other))
        assert ours < 1.5 * theirs + 0.01 * expected.std()


@pytest.mark.parametrize("name", ["llama3", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_an_adapter_is_merged_into_the_weights_of_ranks(name: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, name)

    def merged(group: RankGroup | None = None) -> list[torch.Tensor]:
        options: dict[str, Any] = {"adapter": world.adapter, "max_lora_rank": 16, "ranks": group}
        decoder = load_decoder(world.checkpoint, device="cpu", dtype=torch.float32, **options)
        return steps(run_of(decoder, group))

    whole, ranked = merged(), run_ranks(2, merged)[0]
    assert_near(ranked, whole, 3e-5)
    assert_equal(staged(merged, 1), whole)
    assert_equal(staged(merged, 2), ranked)
    assert_near(adapted_steps(world), whole, 1e-3)


class Slots(NamedTuple):
    """The slots of two ranks, which read folders each for itself.

    Args:
        commands: what rank 0 has written down.
    """

    leader: LeaderSlots
    follower: FollowerSlots
    commands: list[tuple[int, str | None, str | None]]
    contents: list[Any]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, "llama3")


@pytest.fixture
def two(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    """Return the slots of two ranks; the second one is told of folders by its own name of them."""
    decoder = load_decoder(world.checkpoint, device="cpu", dtype=torch.float32)
    inner = make_adapter_slots(world.checkpoint, decoder, 16)
    contents: list[Any] = []
    monkeypatch.setattr(AdapterSlots, "put", lambda _, slot, adapter: contents.append((slot, adapter)))
    sockets = socket.socketpair()
    links = RankLinks(0, {1: sockets[0]}), RankLinks(1, {0: sockets[1]})
    follower = FollowerSlots(inner, 1)
    own = world.adapter.parent / "of rank 1"
    answer_calls(links[1], lambda folder: follower.answer(str(own / Path(folder).name)))
    commands: list[tuple[int, str | None, str | None]] = []
    leader = LeaderSlots(inner, RankCalls(links[0], 2), lambda *command: commands.append(command))
    yield Slots(leader, follower, commands, contents)
    for each in links:
        each.close()


def test_a_folder_that_another_rank_reads_otherwise_is_refused(two: Slots, world: World) -> None:
    theirs = world.adapter.parent / "of rank 1" / "adapter"
    with pytest.raises(CheckpointError, match=r"rank 1 cannot load it: the adapter .* is no folder") as refused:
        two.leader.read(world.adapter)
    assert refused.value.field == "lora_path"
    matrices = random_matrices({"model.layers.0.self_attn.q_proj": (128, 64)}, 4, 2)
    write_adapter(theirs, matrices)
    with pytest.raises(CheckpointError, match="rank 1 finds another adapter in"):
        two.leader.read(world.adapter)
    with pytest.raises(CheckpointError, match="is no folder"):
        two.leader.read(world.adapter.parent / "nowhere")
    shutil.rmtree(theirs)
    shutil.copytree(world.adapter, theirs)
    adapter = two.leader.read(world.adapter)
    assert not two.commands
    two.leader.put(2, adapter)
    two.leader.put(2, None)
    assert two.commands == [(2, adapter.digest, str(world.adapter)), (2, None, None)]


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("_weight", torch.OutOfMemoryError("out of memory"), r"cannot be laid out on cpu \(out of memory"),
        ("_pack", KeyError("rank"), "rank"),
    ],
)
def test_a_rank_that_cannot_lay_an_adapter_out_answers(
    method: str, error: Exception, message: str, two: Slots, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world.adapter, world.adapter.parent / "of rank 1" / "adapter")
    leader, usual = threading.get_ident(), getattr(AdapterSlots, method)

    def fails_elsewhere(self: AdapterSlots, *arguments: Any) -> Any:
        if threading.get_ident() != leader:
            raise error
        return usual(self, *arguments)

    monkeypatch.setattr(AdapterSlots, method, fails_elsewhere)
    with pytest.raises(CheckpointError, match=f"rank 1 cannot load it: .*{message}"):
        two.leader.read(world.adapter)
    monkeypatch.undo()
    assert two.leader.read(world.adapter).packed


def test_another_rank_gives_up_what_it_has_read_where_memory_is_short(two: Slots, world: World) -> None:
    own, memory = world.adapter.parent / "of rank 1", two.follower._inner.memory
    names = []
    for seed in (2, 3):
        matrices = random_matrices({"model.layers.0.self_attn.q_proj": (128, 64)}, 4, seed)
        names.append(str(write_adapter(own / str(seed), matrices)))
    assert "digest" in two.follower.answer(names[0])
    size = memory.taken
    assert size > 0
    memory.allow(0)
    assert "digest" in two.follower.answer(names[1])
    assert memory.taken == size, "the first one has made room"


def test_another_rank_repeats_what_slots_have(two: Slots, world: World) -> None:
    theirs = world.adapter.parent / "of rank 1" / "adapter"
    shutil.copytree(world.adapter, theirs)
    digest = two.leader.read(world.adapter).digest
    shutil.rmtree(theirs)
    two.follower.repeat(1, digest, str(theirs))  # it was read before
    assert [(slot, adapter.digest) for slot, adapter in two.contents] == [(1, digest)]
    two.follower.repeat(1, None, None)
    assert two.contents[-1] == (1, None)
    with pytest.raises(CheckpointError, match="is no folder"):
        two.follower.repeat(0, digest, str(theirs))
    shutil.copytree(world.adapter, theirs)
    two.follower.repeat(0, digest, str(theirs))  # it is read again
    assert two.contents[-1][1].digest == digest
    with pytest.raises(LockstepDrift, match="has changed since"):
        two.follower.repeat(0, "other", str(theirs))
