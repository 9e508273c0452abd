"""Sums, gathers and messages between ranks, by shared memory and by gloo, which is its twin."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from quire.distributed.gloo import GlooTransport
from quire.distributed.rank_group import RankGroup
from quire.distributed.shared_memory import SLOT_BYTES
from quire.errors import LockstepDrift, RankFailed
from tests.distributed.in_threads import make_transports, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gloo_transports(size: int, folder: Path, members: Sequence[int] | None = None) -> list[GlooTransport]:
    """Return transports of gloo, which find each other by a file; made side by side, as ranks do."""
    folder.mkdir(exist_ok=True)
    made: dict[int, GlooTransport] = {}

    def make(rank: int) -> None:
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(folder / "store"), size)
        made[rank] = GlooTransport(store, rank, size, 60.0, "127.0.0.1", members)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[rank] for rank in range(size)]


def test_gloo_names_the_rank_that_it_does_not_reach_where_it_knows(tmp_path: Path) -> None:
    """The other one of two, and rank 0 where that sends; one of several is "a rank", never rank -1."""
    x = torch.ones(4)
    cases: list[tuple[tuple[int, ...], int, dict[int, tuple[str, Callable[[GlooTransport], Any]]]]] = [
        ((2, 5), 1, {0: ("rank 5", lambda one: one.all_reduce(x))}),
        ((2, 5), 0, {1: ("rank 2", lambda one: one.receive())}),
        ((3, 4, 7), 0, {1: ("rank 3", lambda one: one.receive()), 2: ("a rank", lambda one: one.all_reduce(x))}),
    ]
    for members, ended, calls in cases:
        made = gloo_transports(len(members), tmp_path / f"{members}{ended}", members)
        made.pop(ended).close()
        for idx, (name, call) in calls.items():
            with pytest.raises(RankFailed, match=f"^{name} cannot be reached") as failed:
                call(made[idx - (ended < idx)])
            assert failed.value.rank == (int(name[5:]) if name != "a rank" else None)
        for transport in made:
            transport.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs a list of threads")
def test_a_group_of_gloo_leaves_no_thread(tmp_path: Path) -> None:
    """One that took the interpreter's lock while that ends would abort the process."""
    torch.ones(64, 64) @ torch.ones(64, 64)  # the threads of products
    before = threads_of_process()
    made = gloo_transports(2, tmp_path)
    assert run_ranks(2, lambda group: group.of_first(torch.tensor([7 - group.rank])).tolist(), made) == [[7], [7]]
    assert threads_of_process() - before
    for transport in made:
        transport.close()
    # The system lists a thread for a moment after it was joined.
    deadline = time.monotonic() + 30
    while threads_of_process() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads_of_process() - before


def threads_of_process() -> set[str]:
    """Return the ids of this process's threads, those of compiled code too."""
    return set(os.listdir("/proc/self/task"))


@pytest.fixture(params=["shared memory", "gloo"])
def transports(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that makes the transports of a group."""

    def make(size: int) -> Any:
        return make_transports(size) if request.param == "shared memory" else gloo_transports(size, tmp_path)

    return make


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


# One value, a row that fills no vector, a few rows, and more than a slot holds.
@pytest.mark.parametrize("shape", [(1, 1), (3, 19), (32, 1024), (SLOT_BYTES // 4 // 500 + 7, 500)])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_order(size: int, shape: tuple[int, int], transports: Any) -> None:
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
    for found in run_ranks(size, body, transports(size)):
        assert all(map(torch.equal, found, expected))


def test_sums_of_pairs_come_first() -> None:
    def body(group: RankGroup) -> torch.Tensor:
        return group.all_reduce(part_of(group.rank, (3, 19), torch.float32)).clone()

    parts = [part_of(rank, (3, 19), torch.float32) for rank in range(5)]
    pairs = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert not torch.equal(pairs, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    for size, expected in ((4, pairs), (5, pairs + parts[4])):
        assert all(torch.equal(found, expected) for found in run_ranks(size, body, make_transports(size)))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_columns_are_gathered_on_the_first_rank(num_rows: int, transports: Any) -> None:
    widths = [7000, 3, 129]

    def body(group: RankGroup) -> torch.Tensor | None:
        part = part_of(group.rank, (num_rows, widths[group.rank]), torch.float32)
        whole = None
        for _ in range(3):
            whole = group.transport.gather(part, widths)
        return whole

    first, *others = run_ranks(3, body, transports(3))
    assert others == [None, None]
    expected = torch.cat([part_of(rank, (num_rows, width), torch.float32) for rank, width in enumerate(widths)], 1)
    assert first is not None
    assert torch.equal(first, expected)


def test_all_ranks_agree_on_the_likeliest(transports: Any) -> None:
    """The first of equals, also on several ranks."""
    widths = [7000, 3, 129]
    parts = [part_of(rank, (50, width), torch.float32) for rank, width in enumerate(widths)]
    parts[2][1, 128], parts[0][2] = 99.0, float("-inf")
    parts[1][0] = torch.tensor([7.0, 9.0, 8.0])
    parts[0][3, 7:9], parts[1][3, 1], parts[2][3, 5] = 99.0, 99.0, 99.0
    expected = torch.cat(parts, 1).argmax(1)
    assert expected[3] == 7
    numbers = torch.tensor([0, 5, (1 << 24) - 1])

    def body(group: RankGroup) -> list[torch.Tensor]:
        # Each rank has other numbers; those of the first count.
        return [group.agreed_likeliest(parts[group.rank], widths), group.of_first(numbers - group.rank)]

    for found in run_ranks(3, body, transports(3)):
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], numbers)


@pytest.mark.parametrize("length", [1, 1000, 2 * SLOT_BYTES + 5])
def test_commands_come_in_order(length: int, transports: Any) -> None:
    messages = [bytes([idx]) * length for idx in range(4)]

    def body(group: RankGroup) -> list[bytes]:
        if group.rank == 0:
            for message in messages:
                group.send_commands(message)
            return messages
        return [group.receive_commands() for _ in messages]

    assert run_ranks(3, body, transports(3)) == [messages] * 3


def test_all_operations_in_any_order(transports: Any) -> None:
    """Slots are written again only when all readers are done, whatever came between."""
    kinds = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(1)).tolist()

    def body(group: RankGroup) -> list[Any]:
        found: list[Any] = []
        for idx, kind in enumerate(kinds):
            x = torch.full((1, 5), float(group.rank + idx))
            if kind == 0:
                found.append(group.all_reduce(x).sum().item())
            elif kind == 1:
                whole = group.transport.gather(x, [5, 5])
                found.append(None if whole is None else whole.sum().item())
            elif group.rank == 0:
                group.send_commands(str(idx).encode())
            else:
                assert group.receive_commands() == str(idx).encode()
        return found

    first, second = run_ranks(2, body, transports(2))
    sums = [5 * (2 * idx + 1.0) for idx, kind in enumerate(kinds) if kind < 2]
    assert first == sums
    assert [other for other in second if other is not None] == [
        5 * (2 * idx + 1.0) for idx, kind in enumerate(kinds) if kind == 0
    ]


def add(num_values: int) -> Callable[[RankGroup], Any]:
    return lambda group: group.all_reduce(torch.ones(num_values))


def gather(group: RankGroup) -> Any:
    return group.transport.gather(torch.ones(1, 4), (4, 4))


def talk(group: RankGroup) -> Any:
    return group.send_commands(b"abc") if group.rank == 0 else group.receive_commands()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (add(8), add(4)),
        (add(8), talk),
        (talk, add(8)),
        (gather, add(8)),
        (add(8), gather),
        (gather, talk),
        (talk, gather),
    ],
    ids=lambda operation: operation.__qualname__.partition(".")[0],
)
def test_ranks_that_do_different_things_do_not_use_what_they_find(
    first: Callable[[RankGroup], Any], second: Callable[[RankGroup], Any]
) -> None:
    """Sums of another step, or a message that is read as a sum, would be wrong tokens."""
    done: list[Any] = []

    def body(group: RankGroup) -> None:
        talk(group)
        found = (second if group.rank else first)(group)
        add(4)(group)  # who has nothing to read notices with the next operation
        done.append(found)

    with pytest.raises(LockstepDrift, match=r"ranks [01] and [01] exchange different things"):
        run_ranks(2, body)
    assert done == []


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = make_transports(2, timeout_s=0.2)
    with pytest.raises(RankFailed, match=r"rank 1 did not answer within 0\.2 s") as failed:
        first.all_reduce(torch.ones(4))
    assert failed.value.rank == 1


def test_a_failure_ends_a_wait_at_once() -> None:
    first, second = make_transports(2)
    errors: list[RankFailed] = []

    def wait() -> None:
        try:
            first.all_reduce(torch.ones(4))
        except RankFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0)  # it does not matter whether the wait has begun
    second.fail(1)
    thread.join(30)
    assert [error.rank for error in errors] == [1]
    with pytest.raises(RankFailed):  # nor does anything begin any more
        second.send(b"1")
