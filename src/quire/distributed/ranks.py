"""The ranks of a model in one process: its group, its links to the others, and the processes that it has started."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

from quire.config import Machine, StepCost
from quire.distributed.cpu_sets import CpuSets
from quire.distributed.links import LEADER, RankLinks
from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError, LockstepDrift, RankFailed, WorkerError

logger = logging.getLogger(__name__)

# Seconds in which a rank should end by itself.
END_TIMEOUT_S: Final = 10.0
# Loading a model may take long; a rank that ends meanwhile is noticed at once.
LOAD_TIMEOUT_S: Final = 3600.0
# Links report the end of a process some milliseconds after an operation with it has failed.
CAUSE_TIMEOUT_S: Final = 2.0


class RankMemory(NamedTuple):
    """Memory of a rank after its part of the weights is loaded, in bytes.

    Args:
        available: memory of its GPU that can still be allocated; on a CPU, its share of the host's memory.
        total: total memory of its GPU; None on a CPU.
        host: its share of the host's memory that can still be allocated; None on a CPU.
        fixed, per_token, images: memory of a step, and of images between steps; see `StepCost`.
    """

    available: int
    total: int | None
    host: int | None
    fixed: int
    per_token: int
    images: int

    @classmethod
    def of(cls, machine: Machine, step: StepCost, num_local: int) -> RankMemory:
        """Return the memory of one of `num_local` ranks on a host, each with a GPU of its own or all on the CPU."""
        host = None if machine.host_bytes is None else machine.host_bytes // num_local
        available = machine.available_bytes // (num_local if machine.total_bytes is None else 1)
        return cls(available, machine.total_bytes, host, step.fixed_bytes, step.bytes_per_token, step.image_bytes)

    @classmethod
    def least(cls, facts: Sequence[Sequence[Any]]) -> RankMemory:
        """Return the memory to plan with on all ranks: every rank has this much, for any share of a GPU's memory."""
        ranks = [cls(*fact) for fact in facts]
        totals = [rank.total for rank in ranks if rank.total is not None]
        available, total = min(rank.available for rank in ranks), None
        if totals:
            # A cache's size is a share of the total minus the used bytes: take the least total and the most used bytes.
            total = min(totals)
            available = max(0, total - max(rank.total - rank.available for rank in ranks if rank.total is not None))
        hosts = [rank.host for rank in ranks if rank.host is not None]
        return RankMemory(
            available,
            total,
            min(hosts, default=None),
            max(rank.fixed for rank in ranks),
            max(rank.per_token for rank in ranks),
            max(rank.images for rank in ranks),
        )

    def machine(self, probed: Machine, num_threads: int) -> Machine:
        """Return the machine of a rank that has this memory."""
        return replace(
            probed,
            available_bytes=self.available,
            total_bytes=self.total,
            host_bytes=self.host,
            num_threads=num_threads,
        )

    @property
    def step(self) -> StepCost:
        """Memory of a step."""
        return StepCost(fixed_bytes=self.fixed, bytes_per_token=self.per_token, image_bytes=self.images)


class Ranks:
    """The ranks of a model.

    Args:
        group: the group, for the model.
        links: connections to the other ranks.
        cpus: hardware threads of the ranks on this host.
        local_rank: number of this rank on this host.
        processes: processes that this one has started, in the order of their ranks, from 1.

    Attributes:
        group, local_rank: the arguments of these names.
        gpu: number of this rank's GPU among the visible GPUs of its process; None on a CPU.
        end_timeout_s: seconds in which the other ranks should end by themselves.
    """

    def __init__(
        self,
        group: RankGroup,
        links: RankLinks,
        cpus: CpuSets,
        local_rank: int,
        processes: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.group, self.links = group, links
        self.rank, self.size = group.rank, group.size
        self.num_local, self._cpus = len(cpus.shares), cpus
        self.local_rank, self._processes = local_rank, tuple(processes)
        self.gpu: int | None = None
        self._on_failure: Callable[[WorkerError | ConfigError], None] | None = None
        self.end_timeout_s = END_TIMEOUT_S
        self._is_ending = self._is_closed = False
        links.on_failure = self._fail_group
        if links.failure is not None:
            self._fail_group(links.failure)

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which runs the engine."""
        return self.rank == LEADER

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the processes that this one has started."""
        return tuple(process.pid for process in self._processes)

    @property
    def failure(self) -> WorkerError | ConfigError | None:
        """Error of the first rank that failed."""
        return self.links.failure

    def num_threads(self, num_cores: int) -> int:
        """Return the number of threads of this rank on a host with `num_cores` cores."""
        return self._cpus.num_threads(self.local_rank, num_cores)

    def cores(self, num_threads: int) -> tuple[int, ...]:
        """See `CpuSets.cores`."""
        return self._cpus.cores(self.local_rank, num_threads)

    @property
    def home(self) -> tuple[int, ...]:
        """Hardware threads on the NUMA nodes for this rank's memory; see `CpuSets.home`."""
        return self._cpus.home(self.local_rank)

    def agree(self, probe: Callable[[], Machine], step: StepCost) -> tuple[Machine, StepCost]:
        """Return a machine with the least memory of all ranks, so that all ranks get the same number of blocks.

        Args:
            probe: function that returns this rank's machine; it is called when all ranks have loaded.
            step: memory of a step on this rank.

        Returns:
            The machine, with this rank's number of threads, and the greatest step memory of all ranks.

        Raises:
            WorkerError: a rank has failed.
        """
        self.links.agree("loaded", len, LOAD_TIMEOUT_S)
        machine = probe()
        memory = RankMemory.of(machine, step, self.num_local)
        agreed = RankMemory(*self.links.agree(memory, RankMemory.least, LOAD_TIMEOUT_S))
        return agreed.machine(machine, self.num_threads(machine.num_threads)), agreed.step

    def send_commands(self, commands: bytes) -> None:
        """Send commands from rank 0 to all others.

        Raises:
            WorkerError: a rank has failed, or has planned another step.
        """
        try:
            self.group.send_commands(commands)
        except (LockstepDrift, RankFailed) as error:
            raise self.cause_of(error) from error

    # ---- failures ----

    def on_failure(self, call: Callable[[WorkerError | ConfigError], None]) -> None:
        """Register a function to be called, in another thread, when a rank fails; called at once if one has failed."""
        self._on_failure = call
        if self.failure is not None:
            call(self.failure)

    def cause_of(self, error: BaseException) -> WorkerError | ConfigError:
        """Return the error of the rank that made an operation fail here; the group has failed then.

        Args:
            error: error of the operation.
        """
        if isinstance(error, RankFailed):
            # Only the links know which rank ended, and how.
            link_failure = self.links.wait_for_failure(CAUSE_TIMEOUT_S)
            if link_failure is not None:
                return link_failure
            self.fail(error)
            return error
        why = f"failed: {type(error).__name__}: {error}"
        failure = RankFailed(self.rank, why)
        self.fail(failure)
        return failure

    def fail(self, error: WorkerError | ConfigError) -> None:
        """Record that a rank has failed, and end the waits of all ranks."""
        self.links.fail(error)

    def _fail_group(self, error: WorkerError | ConfigError) -> None:
        logger.error("%s", error)
        failed_rank = error.rank if isinstance(error, RankFailed) else None
        self.group.fail(self.rank if failed_rank is None else failed_rank)
        if self._on_failure is not None:
            self._on_failure(error)

    # ---- the end ----

    def expect_end(self) -> None:
        """Expect the other ranks to end, since rank 0 has announced it or is about to."""
        self._is_ending = True
        self.links.expect_end()

    def close(self) -> None:
        """Wait for the other ranks, kill processes started by this one that do not end, and close all connections.

        Without `expect_end`, connections are closed first, which ends the other ranks.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.links.expect_end()
        if not self._is_ending or self.failure is not None:
            self.links.close()
        elif self.is_leader:
            self.links.wait_for_end(self.end_timeout_s)
        deadline = time.monotonic() + self.end_timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("process %d of a rank did not end, and is killed", process.pid)
                process.kill()
                process.wait()
        self.links.close()
        self.group.close()


class RankCalls:
    """Questions of rank 0 to all other ranks, answered in their threads while steps run; thread-safe.

    Args:
        links: connections to them, which carry no other facts meanwhile.
        size: number of ranks.
    """

    def __init__(self, links: RankLinks, size: int) -> None:
        self._links, self._others = links, range(1, size)
        self._lock = threading.Lock()

    @contextmanager
    def ask(self, question: Any) -> Iterator[dict[int, Any]]:
        """Send a JSON value to all; their answers, by rank, are in the dictionary after the context.

        Raises:
            WorkerError: a rank has failed.
        """
        answers: dict[int, Any] = {}
        with self._lock:
            for rank in self._others:
                self._links.send_fact(rank, question)
            try:
                yield answers
            finally:  # an answer that is not received would be taken for the next question's answer
                for rank in self._others:
                    answers[rank] = self._links.receive_fact(rank, LOAD_TIMEOUT_S)


def answer_calls(links: RankLinks, answer: Callable[[Any], Any]) -> None:
    """Answer the questions of rank 0, in a thread of its own, until a rank fails or the links are closed.

    Args:
        links: connection to rank 0.
        answer: function from a question to the answer, which raises nothing.
    """

    def work() -> None:
        while True:
            try:
                question = links.receive_fact(LEADER, threading.TIMEOUT_MAX)
            except (WorkerError, ConfigError):  # a rank has failed, or the links are closed
                return
            links.send_fact(LEADER, answer(question))

    threading.Thread(target=work, name="quire-rank-calls", daemon=True).start()


def exit_soon(timeout_s: float, code: int) -> None:
    """End this process after some time, even if its threads still wait."""
    timer = threading.Timer(timeout_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
