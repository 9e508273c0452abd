"""An engine whose ranks are threads of this process: all of a rank but its process, in a second instead of several."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from quire import LLM
from quire.config import EngineConfig
from quire.distributed.cpu_sets import CpuSets
from quire.distributed.links import LEADER, RankLinks
from quire.distributed.rank_group import RankGroup
from quire.distributed.ranks import Ranks
from quire.engine.startup.rank_process import follow
from quire.engine.startup.start import check_shared
from quire.scheduling.command_log import CommandLog
from tests.distributed.in_threads import TIMEOUT_S, make_transports
from tests.distributed.test_pipeline import make_stages


def compare_every_step(llm: LLM) -> None:
    """Have the ranks of an engine compare the plan and the block tables of every step."""
    log = llm.engine.scheduler.observer
    assert isinstance(log, CommandLog)
    log._digest_interval = 1


@contextmanager
def llm_of_threads(
    model: str = "bundled", size: int = 2, errors: list[BaseException] | None = None, stages: int = 1, **options: Any
) -> Iterator[LLM]:
    """Load a model of which this thread runs rank 0, and others the other ranks; the plan of every step is compared.

    Args:
        model: the model.
        size: number of ranks, of each stage.
        errors: takes the errors of other ranks; None where there must be none.
        stages: number of stages.
        options: options of the engine.
    """
    threads: list[threading.Thread] = []
    ended: list[RankLinks] = []
    found: list[BaseException] = [] if errors is None else errors

    def start(config: EngineConfig) -> Ranks:
        check_shared(config)
        divides_experts = config.parallel.enable_expert_parallel
        if stages > 1:
            shape: dict[str, Any] = {"tensor_parallel_size": size, "enable_expert_parallel": divides_experts}
            groups: list[RankGroup] = [*make_stages(stages, num_microbatches=config.parallel.num_microbatches, **shape)]
        else:
            groups = [RankGroup(each, divides_experts=divides_experts) for each in make_transports(size)]
        leader, *others = make_ranks(groups)
        ended.append(leader.links)

        def work(ranks: Ranks) -> None:
            try:
                follow(ranks, config)
            except BaseException as error:
                found.append(error)
                ranks.links.report(error)
            finally:
                ended.append(ranks.links)

        threads.extend(threading.Thread(target=work, args=(ranks,)) for ranks in others)
        for thread in threads:
            thread.start()
        return leader

    try:
        with patch("quire.engine.startup.start.start", start):
            sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
            llm = LLM(model, **sizes, **{"num_threads": 1, "dtype": "float32", **options})
        compare_every_step(llm)
        with llm:
            yield llm
    finally:
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        for links in ended:
            links.close()
        assert not any(thread.is_alive() for thread in threads)
    assert errors is not None or not found, found


def make_ranks(groups: Sequence[RankGroup]) -> list[Ranks]:
    """Return the ranks of a group, connected as processes are."""
    pairs = {rank: socket.socketpair() for rank in range(1, len(groups))}
    links = [RankLinks(LEADER, {rank: pair[0] for rank, pair in pairs.items()})]
    links += [RankLinks(rank, {LEADER: pair[1]}) for rank, pair in pairs.items()]
    anywhere = CpuSets(((),) * len(groups))
    return [Ranks(group, each, anywhere, group.rank) for group, each in zip(groups, links, strict=True)]
