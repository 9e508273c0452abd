"""`POST /v1/embeddings`, `/v1/score`, `/v1/rerank` and `/classify`: answers without generated tokens."""

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import RequestOutput
from quire.engine.outputs.pooled_outputs import embedding_of, pooled_values
from quire.errors import InvalidParameter
from quire.sequences.pooling import NO_SAMPLING, Pooling, PoolingParams, Role
from quire.server.generation.generation import GenerationRequest, answer, response_header
from quire.server.generation.sampling import LABELS, NEVER_IGNORED, read_options
from quire.server.http.json_stream import JsonArray
from quire.server.protocols.completions import max_prompts, read_prompts
from quire.server.protocols.models import read_fields
from quire.server.requests.fields import Fields, RouteFields
from quire.server.requests.media import refuse_media
from quire.server.state.state import ServerState

ENCODINGS = ("float", "base64")
# Values of `input_type`, as several providers name them -> part of the inputs in a search, which has its own prompt.
INPUT_TYPES: Final[Mapping[str, Role]] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}
_COMMON = ("model", "priority", "cache_salt", "truncate_prompt_tokens")


def _fields(*honoured: str) -> RouteFields:
    return RouteFields((*_COMMON, *honoured), NEVER_IGNORED, LABELS)


EMBEDDING_FIELDS: Final = _fields(
    *("input", "encoding_format", "dimensions", "normalize", "add_special_tokens", "prompt_name", "input_type")
)
_SCORED = ("documents", "instruction", "use_activation", "query_prompt_name", "document_prompt_name")
SCORE_FIELDS: Final = _fields(*_SCORED, "text_1", "text_2", "queries")
RERANK_FIELDS: Final = _fields(*_SCORED, "query", "top_n", "return_documents")
CLASSIFY_FIELDS: Final = _fields("input", "add_special_tokens", "use_activation")
# Makes the fields of an answer from the results of its prompts, and the tokens of these.
Build = Callable[[list[tuple[float, ...]], list[list[int]]], dict[str, Any]]


class PooledReply:
    """Turns the results of pooled requests into an answer, which is never streamed."""

    def __init__(self, head: Mapping[str, Any], build: Build) -> None:
        self._head = head
        self._build = build

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        """Return nothing."""
        return ()

    def text_chunk(self, prompt_idx: int, sample_idx: int, text: str) -> None:  # noqa: ARG002
        """Return nothing."""
        return

    def last_chunk(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer in one piece."""
        results = [pooled_values(output) for output in outputs], [output.prompt_token_ids for output in outputs]
        return {**self._head, **self._build(*results)}


async def embeddings(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/embeddings`: an embedding of each input."""
    fields = await read_fields(state, request, EMBEDDING_FIELDS)
    prompts = read_prompts(fields.get("input"), max_prompts(state), "input")
    encoding = fields.text("encoding_format") or "float"
    if encoding not in ENCODINGS:
        raise InvalidParameter("encoding_format", encoding, f"one of {', '.join(ENCODINGS)}")
    params = PoolingParams(fields.get("dimensions"), fields.get("normalize"), fields.get("truncate_prompt_tokens"))
    config = state.llm.pooling
    config.check(params)
    is_normal = config.normalize if params.normalize is None else params.normalize

    def build(values: list[tuple[float, ...]], _: object) -> dict[str, Any]:
        vectors = (embedding_of(state_, params.dimensions, normalize=is_normal) for state_ in values)
        data = (
            {"object": "embedding", "index": idx, "embedding": _packed(vector) if encoding == "base64" else vector}
            for idx, vector in enumerate(vectors)
        )
        return {"data": JsonArray(data)}

    inputs = config.with_prompt(prompts, fields.text("prompt_name"), role=_role(fields))
    return await _answer_inputs(state, request, fields, inputs, config.pooling, build)


def _role(fields: Fields) -> Role | None:
    """Return the part of the inputs in a search that `input_type` names."""
    kind = fields.text("input_type")
    if kind is None:
        return None
    if kind not in INPUT_TYPES:
        raise InvalidParameter("input_type", kind, f"one of {', '.join(INPUT_TYPES)}")
    if fields.get("prompt_name") is not None:
        raise InvalidParameter("input_type", kind, "absent where prompt_name names the prompt")
    return INPUT_TYPES[kind]


async def classify(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /classify`: the scores of the classes of each input, or of each of its tokens."""
    from quire.engine.scoring import (  # the server starts before the engine is imported
        CLASSES,
        TOKEN_CLASSES,
        class_scores,
        token_scores,
    )

    fields = await read_fields(state, request, CLASSIFY_FIELDS)
    inputs = read_prompts(fields.get("input"), max_prompts(state), "input")
    head = state.llm.pooling.require_classes()
    use_activation = fields.flag("use_activation", True)

    def build(values: list[tuple[float, ...]], _: object) -> dict[str, Any]:
        scores_by_input = [class_scores(head, logits, use_activation=use_activation) for logits in values]
        data = [
            {"index": idx, "label": head.labels[scores.index(max(scores))], "probs": scores, "num_classes": len(scores)}
            for idx, scores in enumerate(scores_by_input)
        ]
        return {"data": data}

    def build_tokens(values: list[tuple[float, ...]], prompts: list[list[int]]) -> dict[str, Any]:
        data = []
        for idx, (logits, token_ids) in enumerate(zip(values, prompts, strict=True)):
            scores = token_scores(head, logits, token_ids, use_activation=use_activation)
            classes = {"positions": [*scores], "probs": [*scores.values()]}
            data.append({"index": idx, "labels": head.labels, **classes, "num_classes": len(head.labels)})
        return {"data": data}

    if head.pooling == "tokens":
        return await _answer_inputs(state, request, fields, inputs, TOKEN_CLASSES, build_tokens)
    return await _answer_inputs(state, request, fields, inputs, CLASSES, build)


async def _answer_inputs(
    state: ServerState, request: Request, fields: Fields, inputs: Sequence[Any], pooling: Pooling, build: Build
) -> ASGIApp:
    """Run a pooled request for each input and return the response."""
    params = PoolingParams(truncate_prompt_tokens=fields.get("truncate_prompt_tokens"))
    special = fields.flag("add_special_tokens", True)
    prepare = partial(
        state.llm.texts.prepare_pooled, inputs, pooling, params.truncate_prompt_tokens, add_special_tokens=special
    )
    return await _answer(
        state, request, fields, len(inputs), prepare, build, {"prompt": "input", "prompt_token_ids": "input"}
    )


async def score(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/score` and `/score`: a score of each document for its query."""
    fields = await read_fields(state, request, SCORE_FIELDS)
    names, others = ("text_1", "text_2"), ("queries", "documents")
    if fields.get("queries") is not None:
        names, others = others, names
    for name in others:
        if fields.get(name) is not None:
            raise InvalidParameter(name, fields.get(name), f"absent unless {others[0]} is given in place of {names[0]}")

    def build(scores: list[float]) -> dict[str, Any]:
        return {"data": [{"index": idx, "object": "score", "score": value} for idx, value in enumerate(scores)]}

    return await _score(state, request, fields, names, [_texts(fields, name) for name in names], build)


async def rerank(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /v1/rerank`, `/v2/rerank` and `/rerank`: the documents in the order of their scores."""
    fields = await read_fields(state, request, RERANK_FIELDS)
    query, documents = fields.text("query"), _texts(fields, "documents")
    if query is None:
        raise InvalidParameter("query", None, "a string")
    top_n = fields.integer("top_n", 0, 2**31 - 1) or None
    has_documents = fields.flag("return_documents", True)

    def build(scores: list[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda idx: -scores[idx])[:top_n]
        return {
            "results": [
                {"index": idx, **({"document": {"text": documents[idx]}} if has_documents else {})}
                | {"relevance_score": scores[idx]}
                for idx in order
            ]
        }

    return await _score(state, request, fields, ("query", "documents"), [[query], documents], build)


async def _score(
    state: ServerState,
    request: Request,
    fields: Fields,
    names: tuple[str, str],
    texts: Sequence[Any],
    build: Callable[[list[float]], dict[str, Any]],
) -> ASGIApp:
    """Run the requests of scores and return the response."""
    from quire.engine.scoring import make_score_job  # the server starts before the engine is imported

    limit = max_prompts(state)
    for name, value in zip(names, texts, strict=True):
        if isinstance(value, list) and len(value) > limit:
            raise InvalidParameter(name, f"{len(value)} texts", f"at most {limit} texts")
    queries, documents = texts
    activation = fields.flag("use_activation", True)
    prompt_names = fields.text("query_prompt_name"), fields.text("document_prompt_name")
    instruction = fields.text("instruction")
    job = make_score_job(state.llm.pooling, queries, documents, instruction, names, activation, prompt_names)
    params = PoolingParams(truncate_prompt_tokens=fields.get("truncate_prompt_tokens"))
    prepare = partial(
        state.llm.texts.prepare_pooled,
        job.prompts,
        job.pooling,
        params.truncate_prompt_tokens,
        add_special_tokens=job.adds_special_tokens,
    )
    return await _answer(
        state,
        request,
        fields,
        len(job.prompts),
        prepare,
        lambda values, _: build(job.scores(values)),
        {"prompt": names[1], "prompt_token_ids": names[1]},
        lambda idx: job.text_name(idx, names),
    )


async def _answer(
    state: ServerState,
    request: Request,
    fields: Fields,
    num_prompts: int,
    prepare: Callable[[], Awaitable[Any]],
    build: Build,
    field_aliases: Mapping[str, str],
    text_name: Callable[[int], str] | None = None,
) -> ASGIApp:
    """Run pooled requests and return the response; see `GenerationRequest`."""
    options = read_options(fields, state.llm.resolved)
    if options.stream:
        raise InvalidParameter("stream", True, "false: the answer has no tokens")
    head = response_header(state, request, "pool", "list")
    job = GenerationRequest(num_prompts, prepare, NO_SAMPLING, options, field_aliases, text_name=text_name)
    return await answer(state, request, job, PooledReply(head, build), head["id"])


def _texts(fields: Fields, name: str) -> Any:
    """Return one text, or several, as a list; objects are replaced by their `text`, other values are unchanged."""
    value = fields.get(name)
    refuse_media(value, name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [item["text"] if isinstance(item, dict) and "text" in item else item for item in value]
    return value


def _packed(values: Sequence[float]) -> str:
    """Return values as base64 of little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
