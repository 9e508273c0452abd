"""Drafts over HTTP: the field that disables them, and their counts in `usage`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess, running

BODY: dict[str, Any] = {"prompt": [7, 8, 9] * 6, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "drafting.log"
    flags = ("--num-kv-blocks", "300", "--speculative-method", "suffix", "--num-speculative-tokens", "6")
    with running(folder, log, *flags) as process:
        yield process


def details(server: ServerProcess, **changes: Any) -> dict[str, int] | None:
    usage = server.post("/v1/completions", BODY | changes).json()["usage"]
    assert usage["completion_tokens"] == 60
    details: dict[str, int] | None = usage.get("completion_tokens_details")
    return details


def test_usage_tells_what_became_of_drafts(drafting: ServerProcess) -> None:
    details(drafting)
    counts = details(drafting)
    assert counts is not None
    assert counts["accepted_prediction_tokens"] > 0
    assert counts["rejected_prediction_tokens"] >= 0
    several = details(drafting, n=1, seed=3)
    assert several is not None
    metrics = drafting.http.get("/metrics").text
    assert "spec_decode_num_accepted_tokens_total" in metrics


def test_a_request_can_do_without(drafting: ServerProcess) -> None:
    assert details(drafting, speculative=False) is None


def test_asking_for_what_there_is_not_is_a_400(server: ServerProcess, drafting: ServerProcess) -> None:
    refused = server.post("/v1/completions", BODY | {"speculative": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculative"
    assert drafting.post("/v1/completions", BODY | {"speculative": "yes"}).status_code == 400
