"""Pins and hints over HTTP."""

from __future__ import annotations

import pytest

from tests.server.process import ServerProcess

PROMPT = list(range(30, 100))
# Conversations of less than a block, and of more tokens than the context has.
SHORT, LONG = ([{"role": "user", "content": content}] for content in ("a", "fox " * 5000))


def num_cached(server: ServerProcess, **body: object) -> int:
    answer = server.post("/v1/completions", {"max_tokens": 1, **body})
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_is_pinned_listed_hit_and_let_go(server: ServerProcess) -> None:
    size = server.http.get("/kv").json()["block_size"]
    answer = server.post("/pin_prefix", {"name": "system", "prompt": PROMPT, "cache_salt": "pins"})
    assert answer.json() == {"name": "system", "pinned_tokens": len(PROMPT) // size * size}
    pins = server.http.get("/kv").json()["pins"]
    assert pins["tokens"] == {"system": len(PROMPT) // size * size}
    assert pins["filled"] == len(PROMPT) // size <= pins["limit"]
    # The pinned blocks, and the tail that was computed with them.
    assert num_cached(server, prompt=PROMPT, cache_salt="pins") == len(PROMPT) - 1
    assert num_cached(server, prompt=PROMPT, cache_salt="others") == 0
    assert f'kv_pinned_blocks{{engine="0",model_name="tiny"}} {pins["filled"]:.1f}' in server.http.get("/metrics").text
    assert server.post("/unpin_prefix", {"name": "system"}).json() == {}
    assert server.http.get("/kv").json()["pins"]["tokens"] == {}


def test_a_conversation_is_pinned_without_the_assistant_s_mark(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Tell me of the fox and the kite, and of all that they saw. " * 4}]
    size = server.http.get("/kv").json()["block_size"]
    ids = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert len(ids) > size
    answer = server.post("/pin_prefix", {"name": "chat", "messages": messages})
    assert answer.json()["pinned_tokens"] == len(ids) // size * size
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "retain_cache": True}).json()
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids) // size * size
    assert server.http.get("/kv").json()["retained_bytes"] > 0
    server.post("/unpin_prefix", {"name": "chat"})


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/pin_prefix", {"prompt": PROMPT}, "name", "invalid_parameter"),
        ("/pin_prefix", {"name": "x"}, "prompt", "invalid_parameter"),
        ("/pin_prefix", {"name": "x", "prompt": "a", "messages": []}, "prompt", "invalid_parameter"),
        ("/pin_prefix", {"name": "x", "prompt": [5]}, "prompt", "invalid_parameter"),
        ("/pin_prefix", {"name": "x", "prompt": [{}] * 50}, "prompt", "invalid_parameter"),
        ("/pin_prefix", {"name": "x", "prompt": PROMPT, "cache_salt": 5}, "cache_salt", "invalid_parameter"),
        ("/pin_prefix", {"name": "", "prompt": PROMPT}, "name", "invalid_parameter"),
        ("/pin_prefix", {"name": "x", "prompt": PROMPT * 100}, "prompt", "context_length_exceeded"),
        ("/pin_prefix", {"name": "x", "messages": LONG}, "messages", "context_length_exceeded"),
        ("/pin_prefix", {"name": "x", "messages": SHORT}, "messages", "invalid_parameter"),
        ("/tokenize", {"messages": LONG}, "messages", "context_length_exceeded"),
        ("/tokenize", {"prompt": "fox " * 5000}, "prompt", "context_length_exceeded"),
        ("/pin_prefix", {"name": "x", "messages": [], "tools": [{}]}, "tools[0].type", "invalid_parameter"),
        ("/unpin_prefix", {"name": "nobody"}, "name", "invalid_parameter"),
        ("/unpin_prefix", {}, "name", "invalid_parameter"),
        ("/v1/completions", {"prompt": "a", "retain_cache": "yes"}, "retain_cache", "invalid_parameter"),
    ],
)
def test_what_is_wrong_is_named(
    server: ServerProcess, path: str, body: dict[str, object], param: str, code: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_pins_end_at_their_limit(server: ServerProcess) -> None:
    limit = server.http.get("/kv").json()["pins"]["limit"]
    names = []
    for i in range(limit + 1):
        answer = server.post("/pin_prefix", {"name": str(i), "prompt": [i + 5] * 70})
        if answer.status_code == 400:
            break
        names.append(str(i))
    error = answer.json()["error"]
    assert error["code"] == "pin_limit_reached"
    assert str(limit) in error["message"]
    for name in names:
        assert server.post("/unpin_prefix", {"name": name}).status_code == 200


def test_a_key_guards_the_pins(narrow_server: ServerProcess) -> None:
    for path in ("/pin_prefix", "/unpin_prefix"):
        answer = narrow_server.http.post(path, json={"name": "x", "prompt": "y"}, headers={"Authorization": ""})
        assert answer.status_code == 401
    refused = narrow_server.post("/pin_prefix", {"name": "x", "prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_feature")


def test_kv_tells_how_long_blocks_live(server: ServerProcess) -> None:
    residency = server.http.get("/kv").json()["residency"]
    assert residency.keys() == {"lifetime", "idle_before_evict", "reuse_gap"}
    assert all(times.keys() == {"num_times", "mean_s", "p50_s", "p90_s"} for times in residency.values())
