"""Runs a request on the engine and sends its answer, whole or as a stream; shared by all protocols."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.engine.inputs.request_options import RequestOptions
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter, RequestError, RequestFailed, UnsupportedFeature, renamed
from quire.sequences.kv_transfer import LOAD_FAILED
from quire.sequences.params import SamplingParams
from quire.server.admission.in_flight import InFlightRequest
from quire.server.admission.stream_merge import ClientGone, Delta, StreamMerger, merge
from quire.server.admission.usage import TokenCount
from quire.server.generation.sampling import Options
from quire.server.generation.served_model import lora_request, model_name
from quire.server.http import sse
from quire.server.http.direct_events import DirectEvents
from quire.server.http.json_stream import JsonAnswer, JsonWriter, first_piece, further_pieces
from quire.server.requests.errors import (
    CLIENT_GONE,
    IN_FLIGHT,
    REQUEST_ID,
    SHOWN_ID,
    ApiError,
    api_error,
    stopping,
    unavailable,
)
from quire.server.state.request_log import shown_prompt
from quire.server.state.state import ServerState
from quire.server.state.tenants import read_tenant

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.inputs.request_builder import PreparedRequest


class Reply(Protocol):
    """Turns the engine's outputs into the answer of a protocol.

    Attributes:
        stream_format: form of its streams.
    """

    stream_format: sse.StreamFormat

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a delta, whose tokens have been counted."""

    def last_chunks(self, count: TokenCount) -> Iterable[dict[str, Any]]:
        """Yield the chunks after all deltas."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error."""

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece.

        Args:
            outputs: output of each prompt.
            count: number of their tokens.
        """


class ResponseBuilder(Protocol):
    """Turns the engine's outputs into the JSON of a route of OpenAI's, without `usage`."""

    def chunks(self, prompt_idx: int, delta: RequestOutput) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a delta."""

    def text_chunk(self, prompt_idx: int, sample_idx: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of further text of a sample that has begun.

        Returns:
            None if the chunk of a delta with that text would differ in more than the text.
        """

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
        is_prompt_only: True if the client requests no output.
        num_prompt_copies: number of times that the answer has the log probabilities of a prompt.
        explain: function that converts an error about a parameter that the route computed to one about the client's
            parameter; None if there is none.
        text_name: function that returns the client's name of a prompt by its index; None if prompts are a list.
    """

    num_prompts: int
    prompts: Callable[[], Awaitable[Sequence[PreparedRequest]]]
    params: SamplingParams
    options: Options
    field_aliases: Mapping[str, str]
    is_prompt_only: bool = False
    num_prompt_copies: int = 1
    explain: Callable[[InvalidParameter], InvalidParameter] | None = None
    text_name: Callable[[int], str] | None = None

    def prompt_name(self, idx: int) -> str:
        """Return the client's name of a prompt, with its index if there are several."""
        if self.text_name is not None:
            return self.text_name(idx)
        name = self.field_aliases.get("prompt", "prompt")
        return name if self.num_prompts == 1 else f"{name}[{idx}]"


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
        "model": model_name(state, request),
        "system_fingerprint": f"quire-{state.version}",
    }


class OpenAIReply:
    """The answer of completions and chat completions: JSON with `usage`."""

    stream_format = sse.OPENAI_EVENTS

    def __init__(self, builder: ResponseBuilder, options: Options) -> None:
        self._builder = builder
        self._options = options

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta."""
        for chunk in self._builder.chunks(prompt_idx, delta):
            if self._options.include_usage:
                chunk["usage"] = count.as_json() if self._options.continuous_usage else None
            yield chunk

    def text_chunk(self, prompt_idx: int, sample_idx: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of further text; see `ResponseBuilder`."""
        chunk = None if self._options.continuous_usage else self._builder.text_chunk(prompt_idx, sample_idx, text)
        return {**chunk, "usage": None} if chunk is not None and self._options.include_usage else chunk

    def last_chunks(self, count: TokenCount) -> Iterator[dict[str, Any]]:
        """Yield the chunk of the usage if the client requests it."""
        if self._options.include_usage:
            yield {**self._builder.last_chunk(), "usage": count.as_json()}

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error."""
        return error.body()

    def whole(self, outputs: Sequence[RequestOutput], count: TokenCount) -> dict[str, Any]:
        """Return the answer in one piece."""
        answer = {**self._builder.whole(outputs), "usage": count.as_json()}
        # A request with several prompts has none.
        if outputs[0].kv_transfer_params is not None:
            answer["kv_transfer_params"] = outputs[0].kv_transfer_params
        return answer


async def answer(
    state: ServerState, request: Request, job: GenerationRequest, builder: ResponseBuilder, answer_id: str
) -> ASGIApp:
    """Run a request and return its response in OpenAI's form; see `run`."""
    return await run(state, request, job, OpenAIReply(builder, job.options), answer_id)


async def run(state: ServerState, request: Request, job: GenerationRequest, reply: Reply, answer_id: str) -> ASGIApp:
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
    tracked = InFlightRequest(answer_id, count, StreamMerger(state.config.ping_interval_s), tenant, params=params)
    request.scope[IN_FLIGHT] = tracked
    direct = None
    if job.options.stream:
        text_chunk = reply.text_chunk if isinstance(reply, OpenAIReply) else None
        direct = DirectEvents(reply, count, tracked.merger, text_chunk)
    batches = _generate(state, request, job, tracked, tenant, direct)
    try:
        with ExitStack() as at_error:
            at_error.callback(tracked.release)
            answer: ASGIApp
            if job.options.stream:
                events = _events(state, reply, tracked, batches, job.num_prompts, request.scope[SHOWN_ID])
                # An error before the first event still determines the status.
                answer = sse.EventStream(await anext(events), events, reply.stream_format.media_type, direct)
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
        if job.explain is not None and isinstance(error, InvalidParameter):
            error = job.explain(error)
        raise _for_client(error, job) from None


def _for_client(error: RequestError, job: GenerationRequest) -> RequestError:
    """Return an error with the client's name of its field, and with the index of one of several prompts."""
    field = job.field_aliases.get(error.field or "", error.field)
    # A feature that the server or the model lacks is missing for every prompt.
    is_unsupported = isinstance(error, UnsupportedFeature)
    if error.prompt_idx is None or error.field not in ("prompt", "prompt_token_ids") or is_unsupported:
        return renamed(error, field)
    name = job.prompt_name(error.prompt_idx)
    return renamed(error, name, "" if name == field else name)


async def _generate(
    state: ServerState,
    request: Request,
    job: GenerationRequest,
    tracked: InFlightRequest,
    tenant: str | None,
    direct: DirectEvents | None,
) -> AsyncGenerator[list[Delta], None]:
    """Yield the output deltas of a request, after its queue slots are reserved."""
    llm, options = state.llm, job.options
    with llm.reserve(job.num_prompts) as slots, state.in_flight.track(tracked):
        prompts = await job.prompts()
        tracked.shown_prompt = shown_prompt((read.prompt for read in prompts), state.config.log_prompts)
        # Log probabilities take many bytes per token, so they are not all left for the end.
        is_short = job.params.logprobs is None and job.params.prompt_logprobs is None
        if not is_short:
            lengths = [len(read.prompt.token_ids) for read in prompts]
            tracked.logprobs = state.logprobs.reserve(
                job.params, lengths, llm.resolved.max_model_len, job.num_prompt_copies
            )
        request_ids = [f"{tracked.answer_id}-{idx}" for idx in range(len(prompts))]
        asked = RequestOptions(
            priority=options.priority,
            flow=tracked.answer_id if tenant is None else tenant,
            cache_salt=options.cache_salt,
            tenant=tenant,
            retain_cache=options.retain_cache,
            lora_request=lora_request(request),
            final_only=direct is None and is_short,
        )
        merger, submitter = tracked.merger, llm.submitter

        async def submit(idx: int) -> Callable[[], None]:
            stream = await submitter.submit(
                prompts[idx], job.params, asked, partial(merger.put, idx), place=slots, request_id=request_ids[idx]
            )
            return partial(submitter.abandon, stream)

        has_added, take = partial(llm.has_added, request_ids), None if direct is None else direct.take
        async with aclosing(merger.deltas(len(prompts), submit, request.receive, has_added, take)) as batches:
            async for batch in batches:
                for idx, delta in batch:
                    _check(delta, "" if job.num_prompts == 1 else f"{job.prompt_name(idx)}: ")
                if tracked.times is None and batch:
                    tracked.times = batch[0][1].metrics
                yield batch


def _check(delta: RequestOutput, where: str) -> None:
    """Raise if the engine has ended a request: clients know neither "error" nor "abort" as a finish reason."""
    reasons = {output.finish_reason for output in delta.outputs}
    if "error" in reasons and delta.error_code == RequestFailed.code:
        raise RequestFailed(f"{where}{delta.error or 'the engine gave no reason'}")
    if "error" in reasons and delta.error_code == LOAD_FAILED:
        raise unavailable(f"{where}{delta.error}", LOAD_FAILED)
    if "error" in reasons:
        raise RuntimeError(delta.error or "the engine gave no reason")
    if "abort" in reasons:
        raise stopping()


async def _whole(
    job: GenerationRequest, reply: Reply, count: TokenCount, batches: AsyncGenerator[list[Delta], None]
) -> dict[str, Any]:
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(batches):
        async for batch in batches:
            for idx, delta in batch:
                count.add(idx, delta)
                merge(outputs, idx, delta)
    return reply.whole([outputs[idx] for idx in range(job.num_prompts)], count)


async def _events(
    state: ServerState,
    reply: Reply,
    tracked: InFlightRequest,
    batches: AsyncGenerator[list[Delta], None],
    num_prompts: int,
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; the events of one batch are joined into one piece unless they are long.

    The batch that finishes the last prompt is joined with the events after it: if the server failed between the two, a
    client would get both an end and an error.
    """
    form, count = reply.stream_format, tracked.count
    writer = JsonWriter(ascii_only=True)
    unfinished = set(range(num_prompts))
    has_begun = False
    last = b""

    def events(batch: list[Delta]) -> Iterator[str]:
        for idx, delta in batch:
            count.add(idx, delta)
            for chunk in reply.chunks(idx, delta, count):
                yield from form.framed(chunk, writer)

    try:
        async with aclosing(batches):
            async for batch in batches:
                unfinished.difference_update(idx for idx, delta in batch if delta.finished)
                piece, remaining = first_piece(events(batch) if batch else [form.ping])
                if not unfinished and remaining is None:
                    last += piece
                elif piece:
                    yield piece
                    has_begun = True
                if remaining is not None:
                    async with aclosing(further_pieces(remaining, state.writing)) as pieces:
                        async for piece in pieces:
                            if tracked.merger.has_client_left:
                                return
                            yield piece
                            has_begun = True
        yield last + b"".join(map(form.one, reply.last_chunks(count))) + form.end
    except ClientGone:
        if not has_begun:
            raise
    except Exception as error:
        if not has_begun:
            raise
        yield last + form.one(reply.error(api_error(error, request_id))) + form.end
    finally:
        tracked.release()
