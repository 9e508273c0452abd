"""Ranks whose tensors lie on devices: the operations that NCCL does on GPUs, done here by gloo on CPU tensors."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputs
from quire.distributed.cpu_sets import CpuSets
from quire.distributed.device_group import DeviceRankGroup, StagedTransport
from quire.distributed.gloo import dist, make_group
from quire.distributed.links import LEADER, RankLinks
from quire.distributed.nccl import WHOLE_BYTES, NcclTransport
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import Ranks
from quire.errors import RankFailed
from tests.distributed.engines import llm_of_threads
from tests.distributed.in_threads import make_transports, run_groups
from tests.distributed.test_shared_memory import DTYPES, part_of

CPU = torch.device("cpu")
WIDTHS = [7000, 3, 129]


def process_groups(size: int, folder: Path) -> list[Any]:
    """Return torch's process groups of the ranks, by gloo; made side by side, as ranks do."""
    made: dict[int, Any] = {}

    def make(rank: int) -> None:
        made[rank] = make_group(dist.FileStore(str(folder / "store"), size), rank, size, 60.0, "127.0.0.1")

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[rank] for rank in range(size)]


@pytest.fixture(params=["process groups", "staged"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], list[DeviceRankGroup]]:
    """Return a function that makes the ranks of a group."""

    def make(size: int) -> list[DeviceRankGroup]:
        hosts = make_transports(size)
        if request.param == "staged":
            return [DeviceRankGroup(StagedTransport(host, CPU), 60.0) for host in hosts]
        pairs = zip(process_groups(size, tmp_path), hosts, strict=True)
        return [DeviceRankGroup(NcclTransport(group, host, CPU), 60.0) for group, host in pairs]

    return make


# One value, rows that are no multiple of the ranks, and more than what is gathered whole.
@pytest.mark.parametrize("shape", [(1, 1), (3, 19), (1, 0), (WHOLE_BYTES // 2 // 500 + 1, 501)])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_order(size: int, shape: tuple[int, int], groups: Any) -> None:
    def body(group: RankGroup) -> list[torch.Tensor]:
        found = []
        for dtype in DTYPES:
            residuals = None, part_of(99, shape, dtype)
            found += [group.all_reduce(part_of(group.rank, shape, dtype), residual).clone() for residual in residuals]
        return found

    expected = []
    for dtype in DTYPES:
        total = part_of(0, shape, dtype).float()
        for rank in range(1, size):
            total = total + part_of(rank, shape, dtype).float()
        expected += [total.to(dtype), (total + part_of(99, shape, dtype).float()).to(dtype)]
    for found in run_groups(groups(size), body):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_rows_for_the_head_go_from_device_to_device(num_rows: int, groups: Any) -> None:
    """Rank 0 asks for logits, then for the likeliest tokens, then sends commands; the others do not know the rows."""
    weights = [part_of(rank, (4, width), torch.float32) for rank, width in enumerate(WIDTHS)]
    hidden = part_of(7, (num_rows, 4), torch.bfloat16)

    def body(group: RankGroup) -> Any:
        def product(rows: torch.Tensor) -> torch.Tensor:
            return rows.float() @ weights[group.rank]

        if group.rank:
            group.serve_head(4, torch.bfloat16, product, product, WIDTHS)
            return group.receive_commands()
        logits = group.head(hidden, product, WIDTHS)
        likeliest = group.likeliest(hidden, product, WIDTHS) if num_rows else None
        group.send_commands(b"next")
        return logits, likeliest

    (logits, likeliest), *others = run_groups(groups(3), body)
    assert others == [b"next"] * 2
    expected = torch.cat([hidden.float() @ weight for weight in weights], 1)
    assert torch.equal(logits, expected)
    if num_rows:
        assert torch.equal(likeliest[1], expected.argmax(-1))


def test_ranks_agree_and_send_commands(groups: Any) -> None:
    def body(group: RankGroup) -> Any:
        if group.rank == 0:
            group.send_commands(b"a" * 1000)
        else:
            assert group.receive_commands() == b"a" * 1000
        group.end_round()
        numbers = group.of_first(torch.tensor([0, 5, (1 << 24) - 1]) - group.rank)
        return [group.is_true_of_all(True), group.is_true_of_all(group.rank != 1), numbers.tolist()]

    assert run_groups(groups(3), body) == [[True, False, [0, 5, (1 << 24) - 1]]] * 3


class Moves:
    """Records where tensors go: a host's, or a group of devices that has none."""

    rank, size, name = 0, 2, "moves"

    def __init__(self) -> None:
        self.seen: list[torch.device] = []

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(x.device)
        return x if residual is None else x + residual

    def gather(self, part: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
        self.seen.append(part.device)
        return part


def test_numbers_in_the_memory_of_hosts_do_not_go_to_devices() -> None:
    """Such as those of a prefix cache on disk: which blocks were read on every rank."""
    host: Any = Moves()
    transport = NcclTransport(None, host, torch.device("meta"))
    transport.all_reduce(torch.ones(3))
    transport.gather(torch.ones(3, 1), [1, 1])
    assert host.seen == [CPU, CPU]
    assert transport.num_started == 0


def test_a_rank_that_fails_ends_operations_of_all(tmp_path: Path) -> None:
    pairs = zip(process_groups(2, tmp_path), make_transports(2), strict=True)
    transports = [NcclTransport(group, host, CPU) for group, host in pairs]
    transports[0].fail(1)
    for call in (lambda: transports[0].all_reduce(torch.ones(3)), lambda: transports[0].broadcast(torch.ones(3))):
        with pytest.raises(RankFailed, match="rank 1 has ended"):
            call()
    with pytest.raises(RankFailed):
        transports[1].receive()
    for transport in transports:
        transport.close()


def test_a_round_that_another_rank_does_not_join_is_ended() -> None:
    """A host that waits for its device sees nothing itself."""
    errors: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
    group = DeviceRankGroup(StagedTransport(make_transports(2)[0], CPU), 0.4)
    group.on_timeout = errors.put
    with group.watched():
        error = errors.get(timeout=60)
    assert error.rank == 1
    assert str(error) == "rank 1 did not answer within 0.4 s; all ranks of the model end"


def test_a_round_that_goes_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    errors: list[RankFailed] = []
    transport = StagedTransport(make_transports(2)[0], CPU)
    group = DeviceRankGroup(transport, 3600.0)
    group.on_timeout = errors.append
    # Between rounds, nobody is waited for.
    for clock[0] in (0.0, 9000.0, 18000.0):
        assert group.look()
    with group.watched():
        assert group.look()
        for clock[0] in (21000.0, 24000.0, 27000.0):
            transport.num_started += 1
            assert group.look()
        clock[0] = 30599.0
        assert group.look()
        assert not errors
        clock[0] = 30600.0
        assert not group.look()
    assert [each.rank for each in errors] == [1]


def linked(groups: Sequence[RankGroup]) -> list[Ranks]:
    """Return the ranks of a group, connected as processes are."""
    pairs = {rank: socket.socketpair() for rank in range(1, len(groups))}
    links = [RankLinks(LEADER, {rank: pair[0] for rank, pair in pairs.items()})]
    links += [RankLinks(rank, {LEADER: pair[1]}) for rank, pair in pairs.items()]
    anywhere = CpuSets(((),) * len(groups))
    return [Ranks(group, each, anywhere, group.rank) for group, each in zip(groups, links, strict=True)]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "ahead"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """Return an engine of one process, and one of two ranks on devices, with and without asynchronous scheduling."""
    options: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "max_model_len": 256, "num_kv_blocks": 40}

    def make(*_: Any, **__: Any) -> list[Ranks]:
        connected = zip(process_groups(2, tmp_path_factory.mktemp("ranks")), make_transports(2), strict=True)
        return linked([DeviceRankGroup(NcclTransport(group, host, CPU), 60.0) for group, host in connected])

    with (
        LLM("bundled", **options) as one,
        patch("tests.distributed.engines.make_ranks", make),
        llm_of_threads("bundled", async_scheduling=request.param, **options) as two,
    ):
        yield one, two


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=12, repetition_penalty=1.2, logprobs=2, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-c]{3} [0-9]{4}")),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1),
    ],
    ids=["greedy", "samples", "grammar", "prompt logprobs"],
)
def test_an_engine_of_ranks_on_devices_gives_what_one_process_gives(
    params: SamplingParams, pair: tuple[LLM, LLM]
) -> None:
    prompts = ["Once upon a time", "The old sailor", "A"]
    one, two = ([[sample.text for sample in each.outputs] for each in llm.generate(prompts, params, use_tqdm=False)]
                for llm in pair)  # fmt: skip
    assert two == one
