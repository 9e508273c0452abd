"""The meeting of ranks that torchrun has started: strangers at rank 0's socket delay no rank."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed

from quire.distributed import torchrun
from quire.distributed.torchrun import MAX_HELLO, MOST_STRANGERS, TorchrunPlace, _follow, _lead
from quire.errors import RankFailed

WAIT_S = 60.0


def store_of_ranks() -> Any:
    distributed: Any = torch.distributed
    return distributed.HashStore()


def test_strangers_at_the_socket_of_rank_0_delay_no_rank() -> None:
    """More of them than may wait: silent, slow, wrong and much too long lines."""
    store, place = store_of_ranks(), TorchrunPlace(0, 3, 0, 3, "127.0.0.1")
    results: dict[int, Any] = {}
    leading = threading.Thread(target=lambda: results.update({0: _lead(store, place)}))
    leading.start()
    _, port, token = json.loads(store.get("links"))
    lines = [b"", b"a", b"secret 1\n", b"x" * (2 * MAX_HELLO), f"{token} 0\n".encode(), f"{token} 9\n".encode()]
    with ExitStack() as stack:
        for idx in range(MOST_STRANGERS + 20):
            visitor = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            visitor.sendall(lines[idx % len(lines)])
        for rank in (2, 1):
            results[rank] = _follow(store, place._replace(rank=rank))
            results[rank][0].send_fact(0, f"from {rank}")  # it may come in one piece with the line
        leading.join(WAIT_S)
        links = {rank: result[0] for rank, result in results.items()}
        assert [links[0].receive_fact(rank, WAIT_S) for rank in (1, 2)] == ["from 1", "from 2"]
        assert {address for _, address in results.values()} == {"127.0.0.1"}
    for one in links.values():
        one.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "RENDEZVOUS_TIMEOUT_S", 0.2)
    with pytest.raises(RankFailed, match=r"rank 1 did not come within 0.2 s"):
        _lead(store_of_ranks(), TorchrunPlace(0, 2, 0, 2, "127.0.0.1"))
