"""Questions of rank 0 to all others, beside the steps: what takes long is done in other threads, and may fail alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.distributed.links import LEADER, RankLinks
from quire.distributed.ranks import LOAD_TIMEOUT_S
from quire.errors import ConfigError, WorkerError


class RankCalls:
    """Asks the other ranks, on rank 0; thread-safe.

    Args:
        links: connections to them, over which no other facts travel.
        size: number of ranks.
    """

    def __init__(self, links: RankLinks, size: int) -> None:
        self._links, self._others = links, range(1, size)
        self._lock = threading.Lock()

    @contextmanager
    def ask(self, question: Any) -> Iterator[dict[int, Any]]:
        """Send a JSON value to all; their answers, by rank, are in the dictionary after the block.

        Raises:
            WorkerError: a rank has failed.
        """
        answers: dict[int, Any] = {}
        with self._lock:
            for rank in self._others:
                self._links.send_fact(rank, question)
            try:
                yield answers
            finally:  # an answer that nobody takes would be that of the next question
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
            except (WorkerError, ConfigError):  # rank 0 says it by itself, or it is the end
                return
            links.send_fact(LEADER, answer(question))

    threading.Thread(target=work, name="quire-rank-calls", daemon=True).start()
