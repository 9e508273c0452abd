"""Which GPU a rank takes, what is refused before anything is loaded, and how much memory all ranks have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.config import EngineConfig, Machine, ParallelConfig, StepCost
from quire.distributed.gpu_ranks import (
    RankDevice,
    check_alike,
    device_of_ranks,
    has_nccl,
    join_devices,
    on_gpu,
    while_all_live,
)
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import RankMemory, Ranks
from quire.errors import ConfigError, RankFailed
from quire.execution.profile.gpu_memory_profile import StepLimits, decode_items, plan_of, prefill_items, run_alone
from quire.execution.runners.build import build_runner
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from tests.distributed.in_threads import make_transports, run_ranks
from tests.distributed.test_device_group import linked
from tests.execution.test_runner import Tiny, tiny_qwen3

GIB = 1 << 30


def two_ranks() -> list[Ranks]:
    return linked([RankGroup(transport) for transport in make_transports(2)])


def put_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch find some GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


class TestDevice:
    def test_a_host_without_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put_gpus(monkeypatch, 0)
        assert device_of_ranks("auto", ParallelConfig(tensor_parallel_size=2), 2) == "cpu"
        with pytest.raises(ConfigError, match="device 'cuda' was asked for") as refused:
            device_of_ranks("cuda", ParallelConfig(tensor_parallel_size=2), 2)
        assert refused.value.field == "device"
        with pytest.raises(ConfigError, match="'nccl' is for GPUs") as refused:
            device_of_ranks("auto", ParallelConfig(tensor_parallel_size=2, all_reduce_backend="nccl"), 2)
        assert refused.value.field == "all_reduce_backend"

    def test_a_gpu_for_each_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put_gpus(monkeypatch, 2)
        for option in ("auto", "cuda"):
            assert device_of_ranks(option, ParallelConfig(tensor_parallel_size=2), 2) == "cuda"
            # Of four ranks, two are on another host.
            assert device_of_ranks(option, ParallelConfig(tensor_parallel_size=4), 2) == "cuda"
        assert device_of_ranks("cpu", ParallelConfig(tensor_parallel_size=4), 4) == "cpu"

    @pytest.mark.parametrize("visible", [None, "1,3"])
    def test_fewer_gpus_than_ranks(self, visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are refused before the checkpoint is looked at, and say what there is."""
        put_gpus(monkeypatch, 2)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ConfigError) as refused:
            LLM("no/such/model", device="cuda", tensor_parallel_size=4)
        seen = "" if visible is None else r" (with CUDA_VISIBLE_DEVICES='1,3')"
        assert refused.value.field == "tensor_parallel_size"
        assert str(refused.value) == (
            "tensor_parallel_size 4 puts 4 ranks on this host, each of which needs a GPU of its own, and PyTorch finds "
            f"2{seen}: use fewer ranks, more hosts, or device 'cpu'"
        )

    @pytest.mark.skipif(has_nccl(), reason="this build of torch has NCCL")
    def test_nccl_that_torch_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put_gpus(monkeypatch, 2)
        with pytest.raises(ConfigError, match="has no NCCL") as refused:
            device_of_ranks("auto", ParallelConfig(tensor_parallel_size=2, all_reduce_backend="nccl"), 2)
        assert refused.value.field == "all_reduce_backend"

    def test_stages_on_a_host_with_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put_gpus(monkeypatch, 2)
        assert device_of_ranks("cpu", ParallelConfig(pipeline_parallel_size=2), 2) == "cpu"
        with pytest.raises(ConfigError, match="device must be 'cpu' with pipeline_parallel_size above 1") as refused:
            device_of_ranks("auto", ParallelConfig(pipeline_parallel_size=2), 2)
        assert refused.value.field == "device"

    @pytest.mark.parametrize(
        ("other", "field", "words"),
        [
            (RankDevice("cpu"), "device", "'cuda' on rank 0 and 'cpu' on rank 3"),
            (RankDevice("cuda", has_bfloat16=False, uses_nccl=True), "device", "that of rank 3 does not"),
            (RankDevice("cuda"), "all_reduce_backend", "rank 0 has it and rank 3 does not"),
        ],
    )
    def test_ranks_whose_devices_differ(self, other: RankDevice, field: str, words: str) -> None:
        first = RankDevice("cuda", uses_nccl=True)
        check_alike(first, first, 3)
        with pytest.raises(ConfigError, match=words) as refused:
            check_alike(first, other, 3)
        assert refused.value.field == field

    def test_ranks_find_out_that_their_devices_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On one of two hosts, `auto` has found a GPU."""
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        leader, other = two_ranks()
        config = ParallelConfig(tensor_parallel_size=2)
        errors: list[BaseException] = []

        def join() -> None:
            try:
                join_devices(other, config, "cuda", None)
            except ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        words = "'cpu' on rank 0 and 'cuda' on rank 1"
        with pytest.raises(ConfigError, match=words):
            join_devices(leader, config, "cpu", None)
        assert other.gpu == 1
        leader.close()
        thread.join(60)
        (error,) = errors
        assert words in str(error), "the error is that of all ranks"
        other.close()

    def test_a_rank_that_ends_while_gpus_are_connected_is_noticed(self) -> None:
        leader, other = two_ranks()
        never = threading.Event()
        assert while_all_live(leader.links, lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            while_all_live(leader.links, lambda: 1 // 0)
        with pytest.raises(RankFailed, match=r"was not connected within 0\.2 s"):
            while_all_live(leader.links, never.wait, 0.2)
        other.links.close()
        with pytest.raises(RankFailed, match="rank 1 has ended"):
            while_all_live(leader.links, never.wait)
        never.set()
        leader.close()

    def test_threads_of_a_rank_compute_on_its_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entered: list[int] = []

        class Entered:
            def __init__(self, gpu: int) -> None:
                self.gpu = gpu

            def __enter__(self) -> None:
                entered.append(self.gpu)

            def __exit__(self, *_: object) -> None:
                entered.append(-1)

        monkeypatch.setattr(torch.cuda, "device", Entered)
        assert on_gpu(None, str)(5) == "5"
        assert on_gpu(3, lambda number: (number, list(entered)))(5) == (5, [3])
        assert entered == [3, -1]


def test_options_of_ranks_on_gpus() -> None:
    for backend in ("auto", "nccl", "gloo", "shared_memory"):
        EngineConfig.from_options(device="cuda", tensor_parallel_size=2, all_reduce_backend=backend)
    for options in ({"tensor_parallel_size": 2, "device": "cpu"}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ConfigError, match="'nccl'") as refused:
            EngineConfig.from_options(**options, all_reduce_backend="nccl")
        assert refused.value.field == "all_reduce_backend"


class TestMemory:
    @staticmethod
    def gpu(free: int, total: int, host: int = 64, step: int = 2) -> RankMemory:
        machine = Machine(device="cuda", available_bytes=free * GIB, num_threads=8, host_bytes=host * GIB,
                          total_bytes=total * GIB)  # fmt: skip
        return RankMemory.of(machine, StepCost(fixed_bytes=step * GIB, bytes_per_token=step), num_local=2)

    def test_the_smallest_cache_counts(self) -> None:
        """For any share of a GPU, and any two of several ranks, no rank has less than is agreed."""
        ranks = [self.gpu(70, 80), self.gpu(60, 80, step=3), self.gpu(40, 48, host=32), self.gpu(1, 24)]
        for first in ranks:
            for second in ranks:
                agreed = RankMemory.least([first, second])
                assert agreed == RankMemory.least([second, first])
                for share in (0.3, 0.5, 0.9, 1.0):
                    budget = budget_of(agreed, share)
                    assert budget <= min(budget_of(first, share), budget_of(second, share))
                assert agreed.available <= min(first.available, second.available)
        assert RankMemory.least(ranks[:2]) == RankMemory(60 * GIB, 80 * GIB, 32 * GIB, 3 * GIB, 3, 0)

    def test_gpus_are_not_shared_and_the_memory_of_hosts_is(self) -> None:
        own = self.gpu(70, 80, host=64)
        assert (own.available, own.host) == (70 * GIB, 32 * GIB)
        cpu = RankMemory.of(Machine(device="cpu", available_bytes=64 * GIB, num_threads=8), StepCost(), num_local=2)
        assert cpu == RankMemory(32 * GIB, None, None, 0, 0, 0)
        assert RankMemory.least([cpu, cpu._replace(available=GIB)]).available == GIB

    def test_all_ranks_get_the_same(self) -> None:
        ranks = two_ranks()
        machines = [Machine(device="cuda", available_bytes=free, num_threads=4, host_bytes=100, total_bytes=total)
                    for free, total in ((70, 80), (50, 64))]  # fmt: skip
        steps = [StepCost(fixed_bytes=3, bytes_per_token=2, image_bytes=7), StepCost(fixed_bytes=4, bytes_per_token=1)]
        found: dict[int, Any] = {}

        def agree(rank: int) -> None:
            found[rank] = ranks[rank].agree(lambda: machines[rank], steps[rank])

        thread = threading.Thread(target=agree, args=(1,))
        thread.start()
        agree(0)
        thread.join(60)
        for each in ranks:
            each.close()
        machine = Machine(device="cuda", available_bytes=50, num_threads=2, host_bytes=50, total_bytes=64)
        assert found[0] == found[1] == (machine, StepCost(fixed_bytes=4, bytes_per_token=2, image_bytes=7))


def budget_of(memory: RankMemory, share: float) -> int:
    """Return the bytes of a cache; see `pool_blocks`."""
    assert memory.total is not None
    return int(memory.total * share) - (memory.total - memory.available + memory.fixed)


def test_steps_that_are_measured_run_on_all_ranks(tmp_path: Path) -> None:
    """No commands follow them: other ranks would wait for some in the output head."""
    Tiny(tiny_qwen3, tmp_path)
    limits = StepLimits(4, 32, 64, 4)

    def body(group: Any) -> int:
        decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32, ranks=group)
        num_groups = len(decoder.cache_groups)
        runner = build_runner(decoder, num_blocks=[2] * num_groups, block_size=4, device="cpu", dtype=torch.float32)
        for storage in runner._storages:
            storage.data.zero_()
        for items in (prefill_items(limits), decode_items(limits, 60)):
            run_alone(runner, plan_of(items, limits, num_groups), decoder.ranks)
        return runner._builder.use.num_steps

    assert run_ranks(2, body) == [2, 2]
