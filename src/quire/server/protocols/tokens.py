"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.engine.inputs.prompts import check_token_ids
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.server.generation.generation import json_response
from quire.server.protocols.chat_completions import render_chat
from quire.server.protocols.models import read_fields
from quire.server.requests.field_names import naming_prompt
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls import read_tools

PART = 1 << 16
# Fields that say how messages become a prompt.
CHAT_FIELDS: Final = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"),
)
TOKENIZE_FIELDS: Final = RouteFields(
    honoured=("model", "prompt", "messages", "add_special_tokens", "return_token_strs", *CHAT_FIELDS),
    refused={
        "chat_template": ((), "templates come with the model, never from requests"),
        "mm_processor_kwargs": (({},), "it is an option of the server; a part with an image may have a detail"),
    },
    neutral={},
)
DETOKENIZE_FIELDS: Final = RouteFields(("model", "tokens"), {}, {})


async def tokenize(state: ServerState, request: Request) -> Response:
    """Answer `POST /tokenize`: the token ids of a prompt, or of a conversation, at most the context length."""
    fields, tokenizer = await _read(state, request, TOKENIZE_FIELDS)
    has_prompt, has_messages = fields.get("prompt") is not None, fields.get("messages") is not None
    if has_prompt == has_messages:
        raise InvalidParameter("prompt", fields.get("prompt"), "given, or else messages")
    if has_prompt:
        for name in CHAT_FIELDS:
            if fields.get(name) is not None:
                raise InvalidParameter(name, fields.get(name), "absent beside a prompt")
    with_texts = fields.flag("return_token_strs")
    if has_messages:
        definitions = [tool.definition for tool in read_tools(fields.get("tools"))]
        prompt: str | ChatPrompt = await render_chat(state, fields, definitions)
    else:
        prompt = fields.text("prompt") or ""
    llm = state.llm
    special = fields.flag("add_special_tokens", has_prompt)
    with naming_prompt(fields):
        ids = await llm.texts.encode(prompt, add_special_tokens=special)

    def respond() -> Response:
        texts = [tokenizer.token_text(token_id) for token_id in ids] if with_texts else None
        head = f'{{"count":{len(ids)},"max_model_len":{llm.resolved.max_model_len},"tokens":'
        parts = [head, *_json_parts(ids), ',"token_strs":', *_json_parts(texts), "}"]
        return _in_parts([part.encode() for part in parts])

    return await llm.texts.run(len(ids), respond)


async def tokenizer_info(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /tokenizer_info`: the special tokens and the chat template, as evaluation programs read them."""
    tokenizer = _tokenizer(state)
    special = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id, "pad_token": None}
    template = tokenizer.chat_template
    return json_response(
        {name: None if token_id is None else tokenizer.token_text(token_id) for name, token_id in special.items()}
        | {
            "chat_template": None if template is None else template.source,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.llm.resolved.max_model_len,
        }
    )


async def detokenize(state: ServerState, request: Request) -> Response:
    """Answer `POST /detokenize`: the text of token ids, special tokens included."""
    fields, tokenizer = await _read(state, request, DETOKENIZE_FIELDS)
    ids, resolved = fields.get("tokens"), state.llm.resolved
    if not isinstance(ids, list):
        raise InvalidParameter("tokens", ids, "a list of token ids")
    if len(ids) > resolved.max_model_len:
        raise InvalidParameter("tokens", f"{len(ids)} tokens", f"at most {resolved.max_model_len} tokens long")

    def respond() -> Response:
        checked = check_token_ids("tokens", ids, resolved.vocab_size)
        return json_response({"prompt": tokenizer.decode(checked, skip_special_tokens=False)})

    return await state.llm.texts.run(len(ids), respond)


def _json_parts(values: Sequence[int | str] | None) -> Iterator[str]:
    """Yield the JSON of a list in parts, each short enough not to block other threads for long."""
    if values is None:
        yield "null"
        return
    yield "["
    for start in range(0, len(values), PART):
        part = json.dumps(values[start : start + PART], ensure_ascii=False, separators=(",", ":"))
        yield part[1:-1] + ("," if start + PART < len(values) else "")
    yield "]"


def _in_parts(parts: Sequence[bytes]) -> Response:
    """Return an answer that is sent in parts: a connection moves its whole buffer at each send."""

    async def each() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    length = str(sum(map(len, parts)))
    return StreamingResponse(each(), headers={"content-length": length}, media_type="application/json")


async def _read(state: ServerState, request: Request, known: RouteFields) -> tuple[Fields, Tokenizer]:
    fields = await read_fields(state, request, known)
    return fields, _tokenizer(state)


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.llm.tokenizer is None:
        raise UnsupportedFeature("prompt", "this server runs without a tokenizer")
    return state.llm.tokenizer
