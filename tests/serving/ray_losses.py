"""The loss of a replica under load: its own streams end with an error, and all other requests have their answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping

import httpx

from tests.serving.ray_apps import GREEDY, PATIENCE_S, REPLICA, RayApp, in_threads

NUM_STREAMS, NUM_WHOLE = 4, 6


def serve_while_lost(app: RayApp, lose: Callable[[Mapping[int, str]], str]) -> str:
    """Serve streams and whole requests while a replica is lost, and check what each client gets.

    Args:
        app: application whose replicas have nothing to do.
        lose: function that ends a replica and returns its name. It is called once all streams have begun, with the
            replica of each.

    Returns:
        The name of the lost replica.
    """
    places: dict[int, str] = {}
    ends: dict[int, list[str]] = {}
    begun = [threading.Event() for _ in range(NUM_STREAMS)]
    answers: list[httpx.Response] = []

    def stream(number: int) -> None:
        body = {**GREEDY, "prompt": [number + 5] * 60, "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            lines, places[number] = [], response.headers[REPLICA]
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) > 2:
                    begun[number].set()
            ends[number] = [line[6:] for line in lines if line.startswith("data: ")]

    def ask(number: int) -> None:
        body = {**GREEDY, "prompt": f"{number} whole " * 9, "max_tokens": 1500}
        answers.append(httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S))

    with in_threads(stream, NUM_STREAMS) as wrong:
        for each in begun:
            assert each.wait(PATIENCE_S)
        # Streams alone are spread by their queues; among others, all of them might be on one replica.
        with in_threads(ask, NUM_WHOLE) as wrong_too:
            app.wait_until(lambda state: sum(each["num_in_flight"] for each in state.values()) > NUM_STREAMS)
            victim = lose(places)
    assert not [*wrong, *wrong_too]
    assert len(ends) == NUM_STREAMS
    for number, (*events, last) in ends.items():
        found = [json.loads(event) for event in events]
        assert last == "[DONE]"
        reasons = [choice["finish_reason"] for each in found for choice in each.get("choices", ())]
        if places[number] == victim:
            assert found[-1]["error"]["code"] == "replica_lost"
            assert not any(reasons)
        else:
            assert reasons[-1] == "length"
    assert [answer.status_code for answer in answers] == [200] * NUM_WHOLE
    return victim
