"""Ollama's routes of embeddings: `/api/embed`, and the older `/api/embeddings` of one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import RequestOutput
from quire.engine.outputs.pooled_outputs import embedding_of, pooled_values
from quire.errors import InvalidParameter
from quire.sequences.pooling import NO_SAMPLING, PoolingParams
from quire.server.admission.usage import TokenCount
from quire.server.generation.generation import GenerationRequest, json_response, run
from quire.server.generation.sampling import NEVER_IGNORED, read_options
from quire.server.http import sse
from quire.server.http.json_stream import JsonArray
from quire.server.protocols.chat_protocols import OWN_OPTIONS
from quire.server.protocols.completions import max_prompts, read_prompts
from quire.server.protocols.ollama import NEUTRAL, read_body
from quire.server.requests.errors import REQUEST_ID, ApiError
from quire.server.requests.fields import Fields, RouteFields
from quire.server.state.state import ServerState

_COMMON = (*OWN_OPTIONS, "model", "name")
_NEUTRAL: Mapping[str, str] = {
    "keep_alive": NEUTRAL["keep_alive"],
    "options": "nothing is generated, and the rest is set at the server's start",
}
EMBED_FIELDS: Final = RouteFields((*_COMMON, "input", "truncate", "dimensions"), NEVER_IGNORED, _NEUTRAL)
EMBED_ONE_FIELDS: Final = RouteFields((*_COMMON, "prompt"), NEVER_IGNORED, _NEUTRAL)
# Makes the fields of an answer from the values of its prompts and the counts of its tokens.
Build = Callable[[list[tuple[float, ...]], TokenCount], dict[str, Any]]


class EmbeddingsReply:
    """Turns pooled results into the answer of a route, which is never streamed."""

    stream_format = sse.JSON_LINES

    def __init__(self, build: Build) -> None:
        self._build = build

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        """Return nothing."""
        return ()

    def last_chunks(self, count: TokenCount) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        """Return nothing."""
        return ()

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error in Ollama's form."""
        return error.ollama_body()

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece."""
        return self._build([pooled_values(output) for output in outputs], count)


async def embed(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /api/embed`: embeddings of length 1; an input that is too long is cut unless `truncate` is false."""
    fields = await read_body(state, request, EMBED_FIELDS)
    inputs: Sequence[Any] = []
    if fields.get("input") not in (None, "", []):
        inputs = read_prompts(fields.get("input"), max_prompts(state), "input")
        if not all(isinstance(item, str) for item in inputs):
            raise InvalidParameter("input", fields.get("input"), "a string or a list of strings")
    params = PoolingParams(
        fields.get("dimensions"), truncate_prompt_tokens=-1 if fields.flag("truncate", True) else None
    )

    def build(values: list[tuple[float, ...]], count: TokenCount) -> dict[str, Any]:
        vectors = (embedding_of(hidden_state, params.dimensions, normalize=True) for hidden_state in values)
        return {
            "model": state.llm.model_name,
            "embeddings": JsonArray(vectors) if values else [],
            "total_duration": count.last_ns - count.begin_ns,
            "load_duration": 0,
            "prompt_eval_count": count.num_prompt,
        }

    return await _embed(state, request, fields, inputs, params, build, "input")


async def embed_one(state: ServerState, request: Request) -> ASGIApp:
    """Answer `POST /api/embeddings`: the embedding of one text as it was pooled; a text that is too long is cut."""
    fields = await read_body(state, request, EMBED_ONE_FIELDS)
    prompt = fields.text("prompt")

    def build(values: list[tuple[float, ...]], count: TokenCount) -> dict[str, Any]:  # noqa: ARG001
        return {"embedding": list(values[0]) if values else []}

    params = PoolingParams(truncate_prompt_tokens=-1)
    return await _embed(state, request, fields, [prompt] if prompt else [], params, build, "prompt")


async def _embed(
    state: ServerState,
    request: Request,
    fields: Fields,
    inputs: Sequence[Any],
    params: PoolingParams,
    build: Build,
    field: str,
) -> ASGIApp:
    """Run a pooled request for each input; the answer is empty without inputs, as clients send to load a model."""
    config = state.llm.pooling
    config.check(params)
    fields.object("options")
    if not inputs:
        return json_response(build([], TokenCount()))
    prompts, pooling = config.with_prompt(inputs), config.pooling
    prepare = partial(state.llm.texts.prepare_pooled, prompts, pooling, params.truncate_prompt_tokens)
    request_fields = Fields({name: fields.get(name) for name in OWN_OPTIONS})
    job = GenerationRequest(
        len(prompts), prepare, NO_SAMPLING, read_options(request_fields, state.llm.resolved), {"prompt": field}
    )
    return await run(state, request, job, EmbeddingsReply(build), f"ollama-{request.scope[REQUEST_ID]}")
