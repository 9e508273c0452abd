"""Request fields of llama.cpp's server: read under another name, refused with a hint, or without effect on answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.server.generation.llama_cpp_fields import ALIASES, UNSUPPORTED, WINDOW, WITHOUT_EFFECT, translate
from quire.server.protocols import chat_completions, completions
from quire.server.requests.fields import Fields
from tests.server import checkpoint
from tests.server.process import ServerProcess, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
# What its web page sends with every request: all at the values at which they change nothing.
PAGE: dict[str, Any] = {
    "samplers": None,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "typical_p": 1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "n_keep": 0,
    "n_probs": 0,
    "min_keep": 0,
    "cache_prompt": True,
    "id_slot": -1,
    "lora": [],
    "reasoning_format": "auto",
    "seed": -1,
    "top_n_sigma": -1,
    "dry_multiplier": 0,
    "dry_penalty_last_n": -1,
}


def answer(server: ServerProcess, path: str, **fields: Any) -> tuple[Any, int]:
    """Return the choices, and the number of new tokens."""
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = server.post(path, {**prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"], found["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_other_names_mean_the_same(server: ServerProcess, path: str) -> None:
    assert answer(server, path, n_predict=7) == answer(server, path, max_tokens=7)
    assert answer(server, path, max_completion_tokens=5)[1] == 5
    penalised = answer(server, path, max_tokens=30, repetition_penalty=9)
    assert answer(server, path, n_predict=30, repeat_penalty=9) == penalised != answer(server, path, max_tokens=30)
    assert len(answer(server, path, n_cmpl=2, max_tokens=1)[0]) == 2
    # -1 is no limit: the answer ends with the context, or by itself.
    assert answer(server, path, n_predict=-1)[1] > 16
    assert answer(server, path, max_tokens=7, **PAGE) == answer(server, path, max_tokens=7)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"n_predict": "3"}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"presence_penalty": 1, "repeat_last_n": 0}, "repeat_last_n"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"samplers": ["top_k", "temperature"]}, "samplers"),
        ({"mirostat": 2}, "mirostat"),
        ({"n_probs": 3}, "n_probs"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"reasoning_format": "none"}, "reasoning_format"),
    ],
)
def test_errors_name_the_clients_field(server: ServerProcess, path: str, fields: dict[str, Any], field: str) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = server.post(path, {**prompt, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_every_field_is_in_one_table() -> None:
    known = (*ALIASES, *UNSUPPORTED, *WITHOUT_EFFECT, WINDOW)
    assert len(known) == len({*known})
    for module in (completions, chat_completions):
        assert {*known} <= module.FIELDS.names
        assert UNSUPPORTED.keys() <= module.FIELDS.refused.keys()
    for name in WITHOUT_EFFECT:
        same, _ = translate(Fields({name: 3}), 10)
        assert same.as_dict() == {name: 3}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_refused_has_a_reason(name: str) -> None:
    neutral, why = UNSUPPORTED[name]
    assert len(why) > 10
    for value in neutral:
        Fields({name: value}).refuse(UNSUPPORTED)
    with pytest.raises(UnsupportedFeature, match=name):
        Fields({name: ["another"]}).refuse(UNSUPPORTED)


def test_a_limit_of_thinking() -> None:
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        body, name_of = translate(Fields({name: -1}), 1000)
        assert body.as_dict() == {"thinking_token_budget": 1000}
        assert name_of("thinking_token_budget") == name
        assert name_of("seed") == "seed"
    with pytest.raises(InvalidParameter, match="thinking_budget_tokens must be absent together with reasoning_budget"):
        translate(Fields({"reasoning_budget_tokens": 1, "thinking_budget_tokens": 1}), 1000)
    assert ALIASES["return_tokens"] == "return_token_ids"


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model without a chat template, as base models are."""
    folder = checkpoint.save(tmp_path_factory.mktemp("models") / "bare")
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with running(folder, tmp_path_factory.mktemp("logs") / "bare.log", "--num-kv-blocks", "60") as process:
        yield process


def test_a_model_without_a_template_says_what_helps(bare_server: ServerProcess) -> None:
    refused = bare_server.post("/api/generate", {"prompt": "hi"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("prompt is not supported: this model has no chat template: set raw to")
    assert "--chat-template FILE" in refused.json()["error"]
    raw = {"prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 3}}
    assert bare_server.post("/api/generate", raw).json()["eval_count"] == 3
    assert "messages is not supported" in bare_server.post("/api/chat", {"messages": USER}).json()["error"]
    assert bare_server.post(CHAT, {"messages": USER}).json()["error"]["param"] == "messages"
