"""The hand-over of a prompt between two servers over HTTP: fields, answers, `/kv` and `/metrics`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.distributed.kvstore.counters import TransferStats
from quire.scheduling.stats import metrics_of
from tests.kvstore.servers import Answer, free_port, relay
from tests.server.process import ServerProcess, running
from tests.server.streams import stream

pytestmark = pytest.mark.slow  # three servers start

BLOCK_SIZE = 16
PROMPT = list(range(30, 105))
WHOLE = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
CONFIG = {
    "kv_port": 0,
    "kv_connector_extra_config": {"timeout_s": 60, "token": "secret", "allowed_hosts": ["127.0.0.1"]},
}
ROLES = {
    "producer": {"kv_role": "kv_producer"},
    "consumer": {"kv_role": "kv_consumer"},
    "patient": {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"},
}
PREFILL = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


class Pair(NamedTuple):
    """Servers of one model: one computes prompts, the others continue them.

    The consumer waits no longer for blocks than computing them takes, which is less than a busy machine takes to send
    them. The patient one waits until all have arrived.
    """

    producer: ServerProcess
    consumer: ServerProcess
    patient: ServerProcess


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    flags: tuple[str, ...] = ("--num-kv-blocks", "300", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8")
    flags = (*flags, "--swap-space", "64MiB")
    with ExitStack() as stack:
        yield Pair(
            *(
                stack.enter_context(
                    running(folder, logs / f"{name}.log", *flags, "--kv-transfer-config", json.dumps(CONFIG | more))
                )
                for name, more in ROLES.items()
            )
        )


def completion(server: ServerProcess, prompt: object, **body: Any) -> dict[str, Any]:
    """Return the answer to a request for the same tokens each time."""
    answer = server.post("/v1/completions", {"max_tokens": 8, "temperature": 0, "prompt": prompt, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def counters(server: ServerProcess) -> dict[str, float]:
    """Return the counters of the hand-over in `/kv`, and find the same in `/metrics`."""
    shown: dict[str, float] = server.http.get("/kv").json()["transfer"]
    text = server.http.get("/metrics").text
    declared = metrics_of(TransferStats)
    assert set(shown) == set(TransferStats._fields) == set(declared)
    for field, metric in declared.items():
        name = f"vllm:{metric.name}" + ("" if metric.kind == "gauge" else "_total")
        (value,) = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert float(value) == pytest.approx(shown[field]), name
    return shown


def test_one_server_computes_and_the_other_continues(pair: Pair) -> None:
    expected = completion(pair.producer, PROMPT, cache_salt="elsewhere")
    assert "kv_transfer_params" not in expected
    sent, taken = counters(pair.producer), counters(pair.patient)
    handed = completion(pair.producer, PROMPT, **PREFILL)["kv_transfer_params"]
    assert handed["do_remote_prefill"] is True
    assert handed["do_remote_decode"] is False
    assert (handed["remote_host"], handed["tp_size"]) == ("127.0.0.1", 1)
    assert handed["remote_port"] > 0
    kept = counters(pair.producer)
    num_blocks = WHOLE // BLOCK_SIZE
    assert kept["num_kept"] - sent["num_kept"] == num_blocks
    assert kept["kept_bytes"] > sent["kept_bytes"]
    answer = completion(pair.patient, PROMPT, kv_transfer_params=handed)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert num_cached(answer) == WHOLE
    assert "kv_transfer_params" not in answer
    now_sent, now_taken = counters(pair.producer), counters(pair.patient)
    assert now_taken["num_hits"] - taken["num_hits"] == num_blocks == now_sent["num_sent"] - kept["num_sent"]
    assert 0 < now_taken["loaded_bytes"] - taken["loaded_bytes"] <= now_sent["sent_bytes"] - kept["sent_bytes"]
    assert now_taken["load_s"] > taken["load_s"]
    for name in ("num_failures", "num_damaged", "num_late", "num_refused"):
        assert now_taken[name] == taken[name]
    # What it has now it asks nobody for.
    assert num_cached(completion(pair.patient, PROMPT, kv_transfer_params=handed)) >= WHOLE
    assert counters(pair.producer)["num_sent"] == now_sent["num_sent"]


def test_a_stream_continues_too(pair: Pair) -> None:
    prompt = [7, *PROMPT]
    expected = completion(pair.producer, prompt, cache_salt="elsewhere")["choices"][0]["text"]
    handed = completion(pair.producer, prompt, **PREFILL)["kv_transfer_params"]
    body = {"max_tokens": 8, "temperature": 0, "prompt": prompt, "kv_transfer_params": handed}
    _, chunks = stream(pair.patient, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == expected
    assert num_cached(chunks[-1]) == WHOLE


def test_a_chat_is_handed_over(pair: Pair) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me of the fox and the kite. " * 6}], "temperature": 0}
    path = "/v1/chat/completions"
    expected = pair.producer.post(path, {**chat, "max_tokens": 8, "cache_salt": "elsewhere"}).json()
    handed = pair.producer.post(path, {**chat, **PREFILL}).json()["kv_transfer_params"]
    answer = pair.patient.post(path, {**chat, "max_tokens": 8, "kv_transfer_params": handed}).json()
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    whole = (answer["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_cached(answer) == whole > 0


def test_an_engine_that_is_gone_costs_no_token(pair: Pair) -> None:
    prompt = [8, *PROMPT]
    expected = completion(pair.producer, prompt)["choices"][0]["text"]
    before = counters(pair.consumer)
    gone = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": free_port()}
    answer = completion(pair.consumer, prompt, kv_transfer_params=gone)
    assert (answer["choices"][0]["text"], num_cached(answer)) == (expected, 0)
    after = counters(pair.consumer)
    assert after["num_failures"] == before["num_failures"] + 1
    assert after["num_hits"] == before["num_hits"]


def test_a_request_whose_blocks_are_damaged_fails_if_so_configured(pair: Pair) -> None:
    prompt = [9, *PROMPT]
    handed = completion(pair.producer, prompt, **PREFILL)["kv_transfer_params"]

    def change(_: int) -> Answer:
        passed = [0]

        def answer(data: bytes) -> bytes:
            passed[0] += len(data)
            return data[:-1] + bytes([data[-1] ^ 1]) if passed[0] > 2000 else data

        return answer

    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    with relay(handed["remote_port"], change) as port:
        answer = pair.patient.post("/v1/completions", {**body, "kv_transfer_params": handed | {"remote_port": port}})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "kv_load_failed"
    assert "retry-after" in answer.headers
    assert completion(pair.patient, prompt)["choices"]


REMOTE = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}


@pytest.mark.parametrize(
    ("role", "body", "param"),
    [
        ("producer", {"kv_transfer_params": REMOTE}, "kv_transfer_params.do_remote_prefill"),
        ("consumer", PREFILL, "kv_transfer_params.do_remote_decode"),
        ("consumer", {"kv_transfer_params": []}, "kv_transfer_params"),
        ("consumer", {"kv_transfer_params": {"other": 1}}, "kv_transfer_params.other"),
        ("consumer", {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.remote_host"),
        (
            "consumer",
            {"kv_transfer_params": {**REMOTE, "remote_host": "192.0.2.1"}},
            "kv_transfer_params.remote_host",
        ),
        (
            "consumer",
            {"kv_transfer_params": {**REMOTE, "remote_host": "unix:/run/any.sock", "remote_port": 0}},
            "kv_transfer_params.remote_host",
        ),
        ("consumer", {"kv_transfer_params": {**REMOTE, "remote_port": "1"}}, "kv_transfer_params.remote_port"),
        ("consumer", {"kv_transfer_params": {**REMOTE, "tp_size": 2}}, "kv_transfer_params.tp_size"),
        ("consumer", {"kv_transfer_params": REMOTE, "prompt": [PROMPT, PROMPT]}, "prompt"),
        ("producer", {**PREFILL, "stream": True}, "stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused(pair: Pair, role: str, body: dict[str, Any], param: str) -> None:
    server: ServerProcess = getattr(pair, role)
    before = counters(server)
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert counters(server) == before
