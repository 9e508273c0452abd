"""Runs a request on the engine and sends its answer, whole or as a stream; shared by completions and chat."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter, RequestError, RequestFailed
from quire.sequences.params import SamplingParams
from quire.server import sse
from quire.server.errors import CLIENT_GONE, REQUEST_ID, api_error, stopping
from quire.server.json_stream import JsonAnswer, JsonWriter, paced
from quire.server.sampling import Options
from quire.server.state import InFlightRequest, ServerState
from quire.server.stream_merge import ClientGone, Delta, StreamMerger, merge
from quire.server.tenants import read_tenant
from quire.server.usage import TokenCount

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.inputs.request_builder import PreparedRequest


class ResponseBuilder(Protocol):
    """Turns the engine's outputs into a route's JSON, without `usage`."""

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a delta."""

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that carries a stream's usage."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer in one piece.

        Args:
            outputs: output of each prompt.
        """


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has been read and checked.

    Args:
        num_prompts: number of requests that `prompts` returns.
        prompts: function that tokenizes the prompts; called after their queue slots are reserved.
        params: sampling parameters of every prompt.
        options: fields other than sampling parameters.
        field_aliases: the client's names of fields, by the engine's; equal names are left out.
        is_prompt_only: True where the client requests no output.
        num_prompt_copies: number of times that the answer has the log probabilities of a prompt.
    """

    num_prompts: int
    prompts: Callable[[], Awaitable[Sequence[PreparedRequest]]]
    params: SamplingParams
    options: Options
    field_aliases: Mapping[str, str]
    is_prompt_only: bool = False
    num_prompt_copies: int = 1


def json_response(body: Mapping[str, Any]) -> Response:
    """Return a JSON answer."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), media_type="application/json")


def response_header(state: ServerState, request: Request, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that are the same in every chunk of an answer."""
    return {
        "id": f"{prefix}-{request.scope[REQUEST_ID]}",
        "object": kind,
        "created": int(time.time()),
        "model": state.llm.model_name,
        "system_fingerprint": f"quire-{state.version}",
    }


async def answer(
    state: ServerState, request: Request, job: GenerationRequest, reply: ResponseBuilder, answer_id: str
) -> ASGIApp:
    """Run a request and return its response.

    Raises:
        RequestError: the request is refused.
        ApiError: a required tenant is missing, the server is stopping, or the engine failed before the first event.
    """
    tenant = read_tenant(state.config, request)
    if state.is_draining:
        raise stopping()
    params = job.params
    count = TokenCount(is_prompt_only=job.is_prompt_only, is_ranked=params.is_ranked, thinking=params.thinking)
    tracked = InFlightRequest(answer_id, count, StreamMerger(state.config.ping_interval_s), tenant)
    batches = _generate(state, request, job, tracked, tenant)
    try:
        with ExitStack() as at_error:
            at_error.callback(tracked.release)
            answer: ASGIApp
            if job.options.stream:
                events = _events(state, job, reply, tracked, batches, request.scope[REQUEST_ID])
                # An error before the first event still determines the status.
                answer = sse.EventStream(await anext(events), events)
            else:
                answer = JsonAnswer(await _whole(job, reply, count, batches), state.writing, tracked.release)
            # From here on the answer releases its reservation.
            at_error.pop_all()
            return answer
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except RequestError as error:
        if state.is_draining:
            raise stopping() from error
        field = job.field_aliases.get(error.field or "", error.field)
        if isinstance(error, InvalidParameter) and field != error.field:
            raise InvalidParameter(field or "", error.value, error.allowed) from error
        error.field = field
        raise


async def _generate(
    state: ServerState, request: Request, job: GenerationRequest, tracked: InFlightRequest, tenant: str | None
) -> AsyncGenerator[list[Delta], None]:
    """Yield the output deltas of a request, after its queue slots are reserved."""
    llm, options = state.llm, job.options
    with llm.reserve(job.num_prompts) as slots, state.track(tracked):
        prompts = await job.prompts()
        lengths = [len(read.prompt.token_ids) for read in prompts]
        tracked.logprobs = state.logprobs.reserve(
            job.params, lengths, llm.resolved.max_model_len, job.num_prompt_copies
        )
        streams = [
            llm.generate(
                prompt,
                job.params,
                request_id=f"{tracked.answer_id}-{idx}",
                priority=options.priority,
                flow=tracked.answer_id if tenant is None else tenant,
                place=slots,
                cache_salt=options.cache_salt,
                tenant=tenant,
                retain_cache=options.retain_cache,
            )
            for idx, prompt in enumerate(prompts)
        ]
        async with aclosing(tracked.merger.deltas(streams, request.receive)) as batches:
            async for batch in batches:
                for _, delta in batch:
                    _check(delta)
                yield batch


def _check(delta: RequestOutput) -> None:
    """Raise where the engine has ended a request: clients know neither "error" nor "abort" as a finish reason."""
    reasons = {output.finish_reason for output in delta.outputs}
    if "error" in reasons and delta.error_code == RequestFailed.code:
        raise RequestFailed(delta.error or "the engine gave no reason")
    if "error" in reasons:
        raise RuntimeError(delta.error or "the engine gave no reason")
    if "abort" in reasons:
        raise stopping()


async def _whole(
    job: GenerationRequest, reply: ResponseBuilder, count: TokenCount, batches: AsyncGenerator[list[Delta], None]
) -> dict[str, Any]:
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(batches):
        async for batch in batches:
            for idx, delta in batch:
                count.add(idx, delta)
                merge(outputs, idx, delta)
    body = reply.whole([outputs[idx] for idx in range(job.num_prompts)])
    return {**body, "usage": count.as_json()}


async def _events(
    state: ServerState,
    job: GenerationRequest,
    reply: ResponseBuilder,
    tracked: InFlightRequest,
    batches: AsyncGenerator[list[Delta], None],
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; the events of one batch are joined into one piece unless they are long."""
    options, count = job.options, tracked.count
    writer = JsonWriter(ascii_only=True)
    has_begun = False

    def events(batch: list[Delta]) -> Iterator[str]:
        for idx, delta in batch:
            count.add(idx, delta)
            for chunk in reply.chunks(idx, delta):
                if options.include_usage:
                    chunk["usage"] = count.as_json() if options.continuous_usage else None
                yield from sse.framed(writer.parts(chunk))

    try:
        async with aclosing(batches):
            async for batch in batches:
                async with aclosing(paced(events(batch) if batch else [sse.PING], state.writing)) as pieces:
                    async for piece in pieces:
                        yield piece
                        has_begun = True
        if options.include_usage:
            yield sse.event({**reply.last_chunk(), "usage": count.as_json()})
        yield sse.DONE
    except ClientGone:
        if not has_begun:
            raise
    except Exception as error:
        if not has_begun:
            raise
        yield sse.event(api_error(error, request_id).body()) + sse.DONE
    finally:
        tracked.release()
