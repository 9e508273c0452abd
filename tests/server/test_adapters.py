"""Adapters over HTTP: they are models, and operators load and unload them where the server allows that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.app import build_app
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.server.state.state import ServerState
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.server.checkpoint import INNER, LAYERS, WIDTH

CLIENT, OPERATOR = {"authorization": "Bearer client"}, {"authorization": "Bearer operator"}
WIDTHS = {
    f"model.layers.{layer}.mlp.{name}": widths
    for layer in range(LAYERS)
    for name, widths in (("up_proj", (INNER, WIDTH)), ("down_proj", (WIDTH, INNER)))
}
Client = httpx.AsyncClient
Run = Callable[[Callable[[Client], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, random_matrices(WIDTHS, 4, seed, std=2.0)))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def llm(folder: Path, paths: dict[str, str]) -> Iterator[AsyncLLM]:
    options: dict[str, Any] = {"num_kv_blocks": 300, "served_model_name": "tiny", "num_threads": 1}
    llm = AsyncLLM.from_options(str(folder), enable_lora=True, lora_modules={"sql": paths["one"]}, **options)
    yield llm
    llm.shutdown()


@pytest.fixture
def serve(llm: AsyncLLM) -> Iterator[Callable[..., Run]]:
    """Return a function that returns a runner of clients of the application, with or without loading."""
    bodies = BodyReader(1 << 20, 4096)

    def make(is_allowed: bool, llm: AsyncLLM = llm) -> Run:
        keys: dict[str, Any] = {"api_key": "client", "operator_key": "operator"}
        config = ServerConfig(allow_runtime_lora_updating=is_allowed, log_interval_s=0, **keys)
        state = ServerState(llm, config, bodies, "0", created=1)

        def run(use: Callable[[Client], Awaitable[None]]) -> None:
            async def main() -> None:
                transport = httpx.ASGITransport(build_app(state))
                async with Client(transport=transport, base_url="http://quire", headers=CLIENT) as client:
                    await use(client)

            asyncio.run(main())

        return run

    yield make
    bodies.close()


async def ask(client: Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    usual |= {"prompt": "Z"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Z"}]}
    answer = await client.post(path, json={**usual, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0].get("text") or answer["choices"][0].get("message"))


def test_an_adapter_is_a_model_that_every_protocol_takes(serve: Callable[[bool], Run], paths: dict[str, str]) -> None:
    async def use(client: Client) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("sql", "tiny")]
        assert [card["model_impl"] for card in cards] == ["native", "native"]
        assert [card["input_modalities"] for card in cards] == [["text"], ["text"]]
        assert (await client.get("/v1/models/sql")).json() == cards[1] | {"root": paths["one"]}
        for path in ("/v1/completions", "/v1/chat/completions"):
            plain, adapted = await ask(client, path, model="tiny"), await ask(client, path, model="sql")
            assert (plain["model"], adapted["model"]) == ("tiny", "sql")
            assert text_of(plain) != text_of(adapted)
            again = await asyncio.gather(*(ask(client, path, model=name) for name in ("sql", "tiny", "sql")))
            assert [*map(text_of, again)] == [text_of(adapted), text_of(plain), text_of(adapted)]
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Z"}], "max_tokens": 2, "model": "sql"}
        message = (await client.post("/v1/messages", json=chat, headers={"x-api-key": "client"})).json()
        response = (await client.post("/v1/responses", json={"input": "Z", "model": "sql"})).json()
        assert (message["model"], response["model"]) == ("sql", "sql")
        ollama = {"model": "sql:latest", "messages": chat["messages"], "stream": False, "options": {"num_predict": 2}}
        assert (await client.post("/api/chat", json=ollama)).json()["model"] == "sql"
        assert [each["name"] for each in (await client.get("/api/tags")).json()["models"]] == ["tiny", "sql"]
        vectors = [
            (await client.post("/v1/embeddings", json={"input": "Z", "model": name})).json()["data"][0]["embedding"]
            for name in ("tiny", "sql")
        ]
        assert vectors[0] != vectors[1]
        answer = await client.post("/v1/completions", json={"prompt": "Z", "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "'tiny', 'sql'" in answer.json()["error"]["message"]

    serve(False)(use)


def test_a_merged_adapter_is_the_model_that_is_served(
    serve: Callable[..., Run], folder: Path, paths: dict[str, str]
) -> None:
    async def merged(client: Client) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("sql", None)]
        answers = await ask(client, model="sql"), await ask(client)
        assert {answer["model"] for answer in answers} == {"sql"}
        assert text_of(answers[0]) == text_of(answers[1])
        for name in ("tiny", str(folder)):
            assert (await client.post("/v1/completions", json={"prompt": "Z", "model": name})).status_code == 404
        body = {"lora_name": "new", "lora_path": paths["two"]}
        answer = await client.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)
        assert answer.status_code == 400
        assert "serves no adapters beside the model" in answer.json()["error"]["message"]

    options: dict[str, Any] = {"merge_lora": True, "lora_modules": {"sql": paths["one"]}, "num_threads": 1}
    llm = AsyncLLM.from_options(str(folder), num_kv_blocks=100, **options)
    try:
        serve(True, llm)(merged)
    finally:
        llm.shutdown()


def test_loading_is_for_operators_of_servers_that_allow_it(serve: Callable[[bool], Run], paths: dict[str, str]) -> None:
    body = {"lora_name": "new", "lora_path": paths["two"]}

    async def is_off(client: Client) -> None:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = await client.post(path, json=body, headers=OPERATOR)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "runtime_lora_updating_off")

    async def use(client: Client) -> None:
        async def post(action: str, expected: int, **changes: Any) -> dict[str, Any]:
            answer = await client.post(f"/v1/{action}_lora_adapter", json=body | changes, headers=OPERATOR)
            assert answer.status_code == expected, answer.text
            whole: dict[str, Any] = answer.json()
            found: dict[str, Any] = whole.get("error", whole)
            return found

        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 403
        one = text_of(await ask(client, model="sql"))
        assert (await post("load", 200))["parent"] == "tiny"
        two = text_of(await ask(client, model="new"))
        assert two != one
        assert (await post("load", 400))["param"] == "lora_name"
        await post("load", 200, lora_path=paths["one"], load_inplace=True)
        assert text_of(await ask(client, model="new")) == one
        for changes, param in (
            ({"lora_path": "/nowhere"}, "lora_path"),
            ({"lora_path": "x" * 300}, "lora_path"),
            ({"lora_path": "~no_such_user/a"}, "lora_path"),
            ({"lora_path": 5}, "lora_path"),
            ({"lora_path": None}, "lora_path"),
            ({"lora_path": "a\0b"}, "lora_path"),
            ({"lora_name": ""}, "lora_name"),
            ({"lora_name": "tiny"}, "lora_name"),
            ({"lora_name": "x" * 300}, "lora_name"),
            ({"load_inplace": "yes"}, "load_inplace"),
        ):
            assert (await post("load", 400, **changes))["param"] == param
        await post("unload", 200)
        assert (await post("unload", 404))["code"] == "model_not_found"
        answer = await client.post("/v1/completions", json={"prompt": "Z", "model": "new"})
        assert answer.status_code == 404

    serve(False)(is_off)
    serve(True)(use)
