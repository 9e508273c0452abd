"""Fifty kills: of requests without a byte none is lost or answered twice, and streams end with a typed error."""

from __future__ import annotations

import json
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import checkpoint
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.serving.fleets import FLAGS, proxy_before

NUM_KILLS = 50


class Load:
    """Clients that send requests, one after the other, until they are told to stop.

    Args:
        url: address of the proxy.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_over = threading.Event()
        self.wrong: list[str] = []
        self.num_whole = self.num_lost = self.num_answered = 0
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            while not self.is_over.is_set():
                body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": f"{rng.randrange(9)}Z" * 9}
                try:
                    if rng.random() < 0.5:
                        self._stream(http, {**body, "max_tokens": 120, "stream": True})
                    else:
                        self._whole(http, {**body, "max_tokens": 2})
                except Exception as error:
                    self.wrong.append(repr(error))

    def _whole(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = http.post("/v1/completions", json=body)
        if answer.status_code != 200 or len(answer.json()["choices"]) != 1:
            self.wrong.append(answer.text)
        with self._lock:
            self.num_answered += 1

    def _stream(self, http: httpx.Client, body: dict[str, Any]) -> None:
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", ())]
        if lines.count("[DONE]") != 1 or len(errors) + ends.count("length") != 1 or set(errors) - {"replica_lost"}:
            self.wrong.append(f"{ends} {errors} {lines[-3:]}")
        with self._lock:
            self.num_lost += bool(errors)
            self.num_whole += not errors


@pytest.mark.slow
def test_fifty_kills_cost_streams_of_the_killed_server_an_error_and_no_request_its_answer(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "tiny")
    rng = random.Random(1)
    with ExitStack() as stack:
        servers: list[ServerProcess] = []
        contexts: list[ExitStack] = []

        def start(idx: int, port: str) -> None:
            context = stack.enter_context(ExitStack())
            flags = (*FLAGS, "--port", port)
            servers[idx : idx + 1] = [context.enter_context(running(folder, tmp_path / f"{idx}.log", *flags))]
            contexts[idx : idx + 1] = [context]

        for idx in range(3):
            start(idx, "0")
        urls = [server.url for server in servers]
        fleet = stack.enter_context(proxy_before(servers, ",".join(urls), tmp_path / "proxy.log"))
        load = Load(fleet.url)
        threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(NUM_KILLS):
                fleet.wait_until(lambda state: all(each["is_available"] for each in state.values()))
                before = load.num_answered + load.num_whole
                victim = rng.randrange(3)
                servers[victim].process.send_signal(signal.SIGKILL)
                servers[victim].process.wait(PATIENCE_S)
                contexts[victim].close()
                start(victim, urls[victim].rpartition(":")[2])
                assert load.num_answered + load.num_whole >= before
        finally:
            load.is_over.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert not load.wrong, load.wrong[:5]
        assert load.num_answered > NUM_KILLS
        assert load.num_lost > 0
