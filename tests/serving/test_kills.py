"""Servers that are killed at random moments, and requests that kill them: no request is lost without a word.

Every request gets the whole answer that one server gives, or a typed error: an event in a stream that has begun, a
status before. A request that kills its server costs two servers at most, and is the only one to get that error.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.forked import PATCH
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.serving.deadly import DEADLY
from tests.serving.fleets import FLAGS, FleetProcesses, proxy_before

MODEL = Path("bundled")
NUM_SERVERS, NUM_PROMPTS, NUM_CLIENTS = 4, 9, 6
TYPED = {"replica_lost", "no_replica", "busy", "queue_full", "request_loses_servers", "replica_timeout"}


class Servers:
    """Servers that start again at their addresses when they were killed.

    Args:
        logs: folder for their logs.
    """

    def __init__(self, logs: Path) -> None:
        self.num_deaths = 0
        self.is_over = threading.Event()
        self._logs = logs
        self._contexts = [ExitStack() for _ in range(NUM_SERVERS)]
        self.servers = [self._start(idx, "0") for idx in range(NUM_SERVERS)]
        self.urls = [server.url for server in self.servers]
        # False from a kill until the server takes requests again.
        self.are_up = [True] * NUM_SERVERS
        self._watching = threading.Thread(target=self._watch)

    def _start(self, idx: int, port: str) -> ServerProcess:
        log = self._logs / f"server-{idx}-{self.num_deaths}.log"
        return self._contexts[idx].enter_context(running(MODEL, log, *FLAGS, "--port", port))

    def _watch(self) -> None:
        while not self.is_over.is_set():
            for idx, server in enumerate(self.servers):
                if server.process.poll() is not None:
                    self.num_deaths += 1
                    self.are_up[idx] = False
                    self._contexts[idx].close()
                    self.servers[idx] = self._start(idx, self.urls[idx].rpartition(":")[2])
                    self.are_up[idx] = True
            time.sleep(0.02)

    def kill(self, idx: int) -> None:
        """Kill a server. Only the other thread asks for its exit code, since asking twice is not safe."""
        self.are_up[idx] = False
        os.kill(self.servers[idx].process.pid, signal.SIGKILL)

    def __enter__(self) -> Servers:
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._watching.join()
        for context in self._contexts:
            context.close()


class Load:
    """Clients that send requests, one after the other, until they are told to stop.

    Args:
        url: address of the proxy.
        expected: answers of a server to the prompts: of requests in one piece, and of streams.
    """

    def __init__(self, url: str, expected: list[tuple[str, str]]) -> None:
        self.url = url
        self.is_over = threading.Event()
        self.wrong: list[str] = []
        self.ends: Counter[str] = Counter()
        self._expected = expected
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            while not self.is_over.is_set():
                number = rng.randrange(NUM_PROMPTS)
                try:
                    is_stream = rng.random() < 0.5
                    end = self._stream(http, number) if is_stream else self._whole(http, number)
                except Exception as error:
                    end = f"lost without a word: {error!r}"
                with self._lock:
                    self.ends[end] += 1
                    if end not in TYPED | {"whole"}:
                        self.wrong.append(end)

    def _whole(self, http: httpx.Client, number: int) -> str:
        answer = http.post("/v1/completions", json=body_of(number, is_stream=False))
        if answer.status_code != 200:
            return str(answer.json()["error"]["code"])
        text = answer.json()["choices"][0]["text"]
        return "whole" if text == self._expected[number][0] else f"another answer: {text!r}"

    def _stream(self, http: httpx.Client, number: int) -> str:
        with http.stream("POST", "/v1/completions", json=body_of(number, is_stream=True)) as response:
            if response.status_code != 200:
                return str(json.loads(response.read())["error"]["code"])
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
        errors = [str(chunk["error"]["code"]) for chunk in chunks if "error" in chunk]
        if lines.count("[DONE]") != 1 or not self._expected[number][1].startswith(text):
            return f"another stream: {text!r} {lines[-3:]}"
        if errors:
            return errors[0]
        return "whole" if text == self._expected[number][1] else f"a part of a stream: {text!r}"


def body_of(number: int, *, is_stream: bool) -> dict[str, Any]:
    prompt = f"{number} little dragons went into the wood"
    limits = {"max_tokens": 60, "stream": True} if is_stream else {"max_tokens": 4}
    return {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": prompt, **limits}


@contextmanager
def loaded(tmp_path: Path) -> Iterator[tuple[Servers, FleetProcesses, Load]]:
    """Start servers, a proxy and clients; check at the end that all requests had an end, and all servers come back."""
    with Servers(tmp_path) as servers:
        expected: list[tuple[str, str]] = []
        for number in range(NUM_PROMPTS):
            texts = []
            for is_stream in (False, True):
                body = {**body_of(number, is_stream=is_stream), "stream": False}
                texts.append(servers.servers[0].post("/v1/completions", body).json()["choices"][0]["text"])
            expected.append((texts[0], texts[1]))
        with proxy_before(servers.servers, ",".join(servers.urls), tmp_path / "proxy.log") as fleet:
            load = Load(fleet.url, expected)
            threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(NUM_CLIENTS)]
            for thread in threads:
                thread.start()
            try:
                yield servers, fleet, load
            finally:
                load.is_over.set()
                for thread in threads:
                    thread.join(PATIENCE_S)
            assert not any(thread.is_alive() for thread in threads), "a request hangs"
            assert not load.wrong, load.wrong[:5]
            fleet.wait_until(lambda state: all(replica["is_available"] for replica in state.values()))
            assert not any(replica["num_in_flight"] for replica in fleet.replicas().values())


def check(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def kill_at_random(servers: Servers, count: int, rng: random.Random) -> None:
    """Kill servers one after the other, at random moments, but at least two run at any time."""
    for _ in range(count):
        check(lambda: sum(servers.are_up) >= NUM_SERVERS - 1, "servers do not start")
        time.sleep(rng.uniform(0.0, 1.0))
        servers.kill(rng.choice([idx for idx, is_up in enumerate(servers.are_up) if is_up]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_servers_that_are_killed_lose_no_request_without_a_word(tmp_path: Path, count: int) -> None:
    with loaded(tmp_path) as (servers, _, load):
        kill_at_random(servers, count, random.Random(1))
        check(lambda: servers.num_deaths >= count, "a server did not end")
        num_ended = sum(load.ends.values())
        check(lambda: sum(load.ends.values()) > num_ended + 20, "no request ends")
    print(f"{count} kills: {dict(load.ends)}")
    assert servers.num_deaths == count
    assert load.ends["whole"] > 2 * count
    assert load.ends["replica_lost"] > 0
    assert load.ends["request_loses_servers"] <= count // 20  # in flight at two kills by chance


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_request_that_kills_costs_two_servers_at_most_and_others_are_answered(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATCH, "tests.serving.deadly")
    with loaded(tmp_path) as (servers, fleet, load):
        for number in range(count):
            poison = {"model": "tiny", "prompt": [5 + number] * DEADLY, "max_tokens": 4}
            for _ in range(2):  # a client that tries again, which costs no further server
                answer = fleet.http.post("/v1/completions", json=poison)
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_loses_servers")
                assert answer.headers["x-should-retry"] == "false"
            while servers.num_deaths < 2 * number + 2:  # the thread that restarts them has not seen it yet
                time.sleep(0.01)
            fleet.wait_until(lambda state: all(replica["is_available"] for replica in state.values()))
        state = fleet.http.get("/router/replicas").json()
    print(f"{count} requests that kill: {servers.num_deaths} deaths, {dict(load.ends)}")
    assert servers.num_deaths == 2 * count
    assert state["num_suspects_refused"] == 2 * count
    assert set(load.ends) <= {"whole", "replica_lost"}
