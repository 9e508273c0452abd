"""Ollama's routes: `/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.server.admission.usage import TokenCount
from quire.server.generation.generation import GenerationRequest, json_response
from quire.server.generation.llama_cpp_fields import WINDOW, check_window
from quire.server.generation.sampling import NEVER_IGNORED
from quire.server.generation.served_model import choose_model, model_name
from quire.server.http import sse
from quire.server.protocols.chat_completions import ChatExtras
from quire.server.protocols.chat_protocols import (
    OWN_OPTIONS,
    Reasoning,
    SampleParts,
    answer_chat,
    arguments_object,
    read_list,
    read_object,
    required_text,
    thinking_switch,
)
from quire.server.protocols.completions import read_completion
from quire.server.requests.errors import REQUEST_ID, ApiError
from quire.server.requests.fields import Fields, Refusal, RouteFields
from quire.server.state.state import ServerState
from quire.text.chat.images import base64_image
from quire.text.tool_calls import CallDelta

# The options of a request, and their names in a chat.
OPTIONS: Mapping[str, str] = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
OPTION_NAMES = {chat: option for option, chat in OPTIONS.items()}
NAMES: Sequence[tuple[str, str]] = (  # patterns of a chat's other fields -> Ollama's names
    (r"^response_format(\.json_schema\.schema)?", "format"),
    (r"^(messages\[\d+\])\.reasoning_content$", r"\1.thinking"),
    (r"^(messages\[\d+\])\.name$", r"\1.tool_name"),
)
# Options of Ollama's own loading and memory: this server's options have been set at its start.
LOAD_OPTIONS = (
    *("num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "penalize_newline"),
)
_NEUTRAL_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(LOAD_OPTIONS, "set at the server's start"),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "a setting of a method that is refused"),
}
NEUTRAL: Mapping[str, str] = {
    "keep_alive": "the model stays loaded",
    **{f"options.{name}": why for name, why in _NEUTRAL_OPTIONS.items()},
}
_CHAT_HAS_IT: Refusal = (([],), "send the conversation to /api/chat")
_MESSAGES_HAVE_IT: Refusal = (("", False, []), "send it in messages")


def _fields(honoured: tuple[str, ...], refused: Mapping[str, Refusal]) -> RouteFields:
    """Return the fields of a generating route, beside those that both have."""
    return RouteFields(
        honoured=(
            *OWN_OPTIONS,
            *("model", "name", "format", "options", "stream", "think"),
            *honoured,
            *(f"options.{name}" for name in (*OPTIONS, WINDOW)),
        ),
        refused={
            **NEVER_IGNORED,
            "logprobs": ((False,), "use /v1/chat/completions for log probabilities"),
            "template": (("",), "templates come with the model, never from requests"),
            "options.mirostat": ((0,), "use min_p, top_n_sigma or typical_p of /v1/chat/completions"),
            "options.tfs_z": ((1, 1.0), "use min_p of the options"),
            **refused,
        },
        neutral={**NEUTRAL, "top_logprobs": "logprobs is refused"},
        objects=("options",),
    )


CHAT_FIELDS: Final = _fields(
    ("messages", "tools"),
    dict.fromkeys(("prompt", "system", "raw", "suffix", "context", "images"), _MESSAGES_HAVE_IT),
)
GENERATE_FIELDS: Final = _fields(
    ("prompt", "system", "raw", "images"),
    {
        **dict.fromkeys(("messages", "tools", "context"), _CHAT_HAS_IT),
        "suffix": (("",), "the models served here continue a text, they do not fill one in"),
        **dict.fromkeys(("width", "height", "steps"), ((0,), "the model makes no images")),
    },
)
SHOW_FIELDS: Final = RouteFields(
    ("model", "name"),
    dict.fromkeys(("template", "system"), (("",), "it shows the model as it is served")),
    dict.fromkeys(("verbose", "options"), "the answer has all that is shown of the model"),
)
MAX_PREDICT = 2**31 - 1
WHOLE_OPTIONS = ("num_predict", "top_k", "seed")  # which clients also send as 8.0
THINKING = (True, False, "high", "medium", "low")
# Time at which the model is unloaded. Ollama too states a date of a far century; the next year must exist, or clients
# could not convert it to their own time zone.
NEVER = "9000-01-01T00:00:00Z"
LATEST = ":latest"


async def chat(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /api/chat`."""
    fields = await read_body(state, request, CHAT_FIELDS)
    if fields.get("messages") in (None, []):
        return _loaded(state, {"message": {"role": "assistant", "content": ""}})
    return await answer_chat(
        state, request, read_conversation(fields), partial(ChatLines, model_name(state, request)), _id(request), rename
    )


async def generate(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /api/generate`: a prompt as a conversation of one message, or unchanged with `raw`."""
    fields = await read_body(state, request, GENERATE_FIELDS)
    prompt, is_raw, values = fields.text("prompt"), fields.flag("raw"), read_prompt(fields)
    if not prompt:
        return _loaded(state, {"response": ""})
    reply = partial(TextLines, model_name(state, request))
    if is_raw:
        if values["max_tokens"] is None:
            values["max_tokens"] = state.llm.resolved.max_model_len
        return await answer_chat(state, request, values, reply, _id(request), rename, _read_raw)
    if state.llm.tokenizer is not None and state.llm.tokenizer.chat_template is None:
        why = "this model has no chat template: set raw to true, or start the server with --chat-template FILE"
        raise UnsupportedFeature("prompt", why)
    names = {"messages": "prompt"}
    return await answer_chat(state, request, values, reply, _id(request), lambda name: rename(names.get(name, name)))


def read_conversation(fields: Fields) -> dict[str, Any]:
    """Convert the fields of `/api/chat` to the fields of a chat."""
    messages = list(_read_messages(fields.get("messages")))
    return read_chat_fields(fields) | {"messages": messages, "tools": fields.get("tools")}


def read_prompt(fields: Fields) -> dict[str, Any]:
    """Convert the fields of `/api/generate` to the fields of a chat, or of a completion if the prompt is raw."""
    prompt, system = fields.text("prompt"), fields.text("system")
    if fields.flag("raw"):
        if fields.get("images"):
            raise UnsupportedFeature("images", "a raw prompt has no images; send the conversation without raw")
        return read_chat_fields(fields) | {"prompt": prompt}
    turns = [{"role": "system", "content": system}] if system else []
    content = _with_images(fields, prompt, "prompt")
    return read_chat_fields(fields) | {"messages": [*turns, {"role": "user", "content": content}]}


async def tags(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /api/tags`."""
    names = [state.llm.model_name, *[adapter.name for adapter in state.llm.adapters.loaded]]
    shared = {"modified_at": _timestamp(state.created), "details": _details(state)}
    return json_response({"models": [{"name": name, "model": name, **shared} for name in names]})


async def running(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /api/ps` with the loaded model, without the size of its weights and a digest, which are unknown."""
    resolved = state.llm.resolved
    model: dict[str, Any] = {"name": state.llm.model_name, "model": state.llm.model_name, "details": _details(state)}
    model |= {"expires_at": NEVER, "context_length": resolved.max_model_len}
    return json_response({"models": [model | ({"size_vram": 0} if resolved.device == "cpu" else {})]})


async def show(state: ServerState, request: Request) -> Response:
    """Answer `POST /api/show`."""
    fields = await read_body(state, request, SHOW_FIELDS)
    required_text(fields, "model" if fields.get("name") is None else "name")
    tokenizer, resolved, defaults = state.llm.tokenizer, state.llm.resolved, state.llm.default_sampling_params()
    template = None if tokenizer is None else tokenizer.chat_template
    return json_response(
        {
            "modified_at": _timestamp(state.created),
            "parameters": "\n".join(
                f"{OPTION_NAMES[name]} {value}" for name, value in defaults.items() if name in OPTION_NAMES
            ),
            "template": "" if template is None else template.source,
            "details": _details(state),
            "model_info": {"general.architecture": "quire", "quire.context_length": resolved.max_model_len},
            "capabilities": _capabilities(state),
        }
    )


def _capabilities(state: ServerState) -> list[str]:
    """Return the capabilities of the model, by Ollama's names."""
    can = {
        "completion": state.llm.pooling.has_head,
        "tools": state.llm.pooling.has_head and state.tool_format is not None,
        "thinking": state.llm.pooling.has_head and state.reasoning is not None,
        "vision": state.llm.texts.max_images > 0,
        "embedding": state.llm.pooling.refusal is None,
    }
    return [name for name, is_there in can.items() if is_there]


async def version(state: ServerState, request: Request) -> Response:  # noqa: ARG001 - a route's signature
    """Answer `GET /api/version` with the version of Quire."""
    return json_response({"version": state.version})


async def read_body(state: ServerState, request: Request, known: RouteFields) -> Fields:
    """Return the fields of a request for the served model, which `:latest` may follow; see `models.read_fields`."""
    fields = Fields(await state.bodies.read_object(request))
    fields.check(known)
    name = fields.text("model") or fields.text("name")
    if name is not None:
        choose_model(state, request, name if name == state.llm.model_name else name.removesuffix(LATEST))
    return fields


def rename(field: str) -> str:
    """Return Ollama's name of a field of a chat."""
    if field in OPTION_NAMES:
        return f"options.{OPTION_NAMES[field]}"
    for pattern, name in NAMES:
        field = re.sub(pattern, name, field)
    return field


def read_chat_fields(fields: Fields) -> dict[str, Any]:
    """Convert the fields of both routes to the fields of a chat."""
    values = {name: fields.get(name) for name in OWN_OPTIONS}
    values["stream"] = fields.flag("stream", True)
    options = fields.object("options") or Fields({}, "options.")
    check_window(options)
    values |= {chat: _option(options, option) for option, chat in OPTIONS.items()}
    values["max_tokens"] = _read_limit(options.name("num_predict"), values["max_tokens"])
    form = fields.get("format")
    if form == "json":
        values["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        values["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    elif form not in (None, ""):
        raise InvalidParameter("format", form, '"json" or a JSON schema')
    think = fields.get("think")
    if think is not None and not any(think == one and type(think) is type(one) for one in THINKING):
        raise InvalidParameter("think", think, 'true, false, "high", "medium" or "low"')
    return values | thinking_switch(None if think is None else bool(think))


def _option(options: Fields, name: str) -> Any:
    value = options.get(name)
    is_whole = name in WHOLE_OPTIONS and isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def _read_limit(field: str, value: object) -> int | None:
    """Return the maximum number of new tokens; Ollama takes any number below 1 for no limit."""
    if value is None:
        return None
    if type(value) is not int or value > MAX_PREDICT:
        raise InvalidParameter(field, value, f"an integer of at most {MAX_PREDICT}; one below 1 sets no limit")
    return value if value >= 1 else None


def _read_messages(items: object) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat; calls, and their results in the same order, get ids, which templates may need."""
    ids: list[str] = []
    num_calls = 0
    for idx, value in enumerate(read_list(items, "messages", "messages")):
        message = read_object(value, f"messages[{idx}]")
        role, calls = message.get("role"), message.get("tool_calls") or []
        turn = {name: message.get(name) for name in ("role", "content", "sanitize_control_tokens")}
        turn["content"] = _with_images(message, message.get("content"), message.name("content"))
        turn["reasoning_content"] = message.get("thinking")
        if not isinstance(calls, list):
            raise InvalidParameter(message.name("tool_calls"), calls, "a list of tool calls")
        turn |= {"tool_calls": []} if calls else {}
        for number, given_call in enumerate(calls):
            call = read_object(given_call, f"{message.name('tool_calls')}[{number}]").as_dict()
            num_calls += 1
            ids.append(call.get("id") or f"{num_calls:09d}")
            turn["tool_calls"].append({**call, "id": ids[-1]})
        if role == "tool":
            turn["name"] = message.get("tool_name")
            turn["tool_call_id"] = message.get("tool_call_id") or (ids.pop(0) if ids else None)
        yield turn


def _with_images(fields: Fields, content: object, name: str) -> object:
    """Return content with the images beside it, which come before the text as in Ollama's templates."""
    images, field = fields.get("images"), fields.name("images")
    if images is None or images == []:
        return content
    if not isinstance(images, list):
        raise InvalidParameter(field, images, "a list of image files in base64")
    if not isinstance(content, str | None):
        raise InvalidParameter(name, content, "a string beside images")
    parts = [base64_image(image, f"{field}[{idx}]", field, "image") for idx, image in enumerate(images)]
    return [*parts, {"type": "text", "text": content}] if content else parts


def _read_raw(state: ServerState, fields: Fields) -> tuple[GenerationRequest, ChatExtras]:
    job, _, _ = read_completion(state, fields)
    return job, ChatExtras(top_logprobs=None, prompt_logprobs=None, token_ids=False)


class ChatLines:
    """Turns outputs into the lines of `/api/chat`; a call is in one line, once it is complete."""

    stream_format = sse.JSON_LINES

    def __init__(self, model: str, extras: ChatExtras) -> None:
        self._model = model
        self._parts = SampleParts(extras)
        # The call that has begun.
        self._name = ""
        self._arguments: list[str] = []
        self._finish_reason: str | None = None

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterator[dict[str, Any]]:  # noqa: ARG002
        """Yield the lines of a delta."""
        for output in delta.outputs:
            for piece in self._add(output, delta.prompt_token_ids):
                yield self._line(self._body([piece]))

    def last_chunks(self, count: TokenCount) -> Iterator[dict[str, Any]]:
        """Yield the line that ends the stream."""
        yield self._line(self._body([]), count)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the line that ends a stream with an error."""
        return error.ollama_body()

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece; a call that was cut off is left out."""
        return self._line(self._body(list(self._add(outputs[0].outputs[0], outputs[0].prompt_token_ids))), count)

    def _add(self, output: CompletionOutput, prompt_ids: Sequence[int]) -> Iterator[str | Reasoning | dict[str, Any]]:
        """Yield the text, the reasoning, or the whole call, of each piece that new output completes."""
        self._finish_reason = output.finish_reason
        for piece in self._parts.add(output, prompt_ids):
            if not isinstance(piece, CallDelta):
                yield piece
            elif (call := self._add_call(piece)) is not None:
                yield call

    def _add_call(self, piece: CallDelta) -> dict[str, Any] | None:
        if piece.name is not None:
            self._name, self._arguments = piece.name, []
        self._arguments.append(piece.arguments)
        arguments = arguments_object("".join(self._arguments)) if piece.is_last else None
        if arguments is None:
            return None
        return {
            "id": self._parts.new_id(self._name, piece.index),
            "function": {"name": self._name, "arguments": arguments},
        }

    def _body(self, pieces: Sequence[str | Reasoning | dict[str, Any]]) -> dict[str, Any]:
        message = {"role": "assistant", "content": _joined(pieces), **_thinking(pieces)}
        calls = [piece for piece in pieces if isinstance(piece, dict)]
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _line(self, body: dict[str, Any], count: TokenCount | None = None) -> dict[str, Any]:
        """Return one line; with the counts it is the last one."""
        line = {"model": self._model, "created_at": _timestamp(time.time()), **body, "done": count is not None}
        if count is None:
            return line
        return line | {
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": count.last_ns - count.begin_ns,
            "load_duration": 0,
            "prompt_eval_count": count.num_prompt,
            "prompt_eval_duration": count.first_ns - count.begin_ns,
            "eval_count": count.num_output,
            "eval_duration": count.last_ns - count.first_ns,
        }


class TextLines(ChatLines):
    """Turns outputs into the lines of `/api/generate`."""

    def _body(self, pieces: Sequence[str | Reasoning | dict[str, Any]]) -> dict[str, Any]:
        return {"response": _joined(pieces), **_thinking(pieces)}


def _joined(pieces: Sequence[object]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _thinking(pieces: Sequence[object]) -> dict[str, str]:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return {"thinking": text} if text else {}


def _loaded(state: ServerState, body: Mapping[str, Any]) -> Response:
    """Return the answer to a request without a prompt, which clients send to load a model: it is loaded already."""
    line = {"model": state.llm.model_name, "created_at": _timestamp(time.time()), **body}
    return json_response({**line, "done": True, "done_reason": "load"})


def _details(state: ServerState) -> dict[str, Any]:
    quantization = state.llm.resolved.quantization
    return {} if quantization is None else {"quantization_level": str(quantization)}


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _id(request: Request) -> str:
    return f"ollama-{request.scope[REQUEST_ID]}"
