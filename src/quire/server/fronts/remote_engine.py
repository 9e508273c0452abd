"""An engine in another process, as the routes of a front use it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from quire.engine.adapters import LoadedAdapter
from quire.engine.exporters.engine_report import EngineReport
from quire.engine.inputs.prompts import Prompt, PromptReader
from quire.engine.inputs.request_builder import PreparedRequest, RequestBuilder
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.inputs.tokenizer_pool import TokenizerPool
from quire.engine.kv.pinning import ONE_TOKEN
from quire.engine.outputs.mailbox import OutputMailbox
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.errors import NoAnswer, QueueFull, WorkerError
from quire.sequences.lora import LoRARequest
from quire.sequences.params import SamplingParams
from quire.server.fronts.front_texts import FrontTexts
from quire.server.fronts.heartbeat import HUNG_AFTER_S
from quire.server.fronts.messages import (
    AbortStream,
    Acknowledge,
    DeltaRow,
    Message,
    Outputs,
    ReleaseSlots,
    ReserveSlots,
    Row,
    Submit,
    TextRow,
)
from quire.server.fronts.peer import Peer
from quire.server.fronts.queue_gauge import QueueGauge
from quire.server.fronts.welcome import Welcome, read_pooling_fields
from quire.server.fronts.wire_errors import decode_error
from quire.server.fronts.wire_outputs import read_delta
from quire.server.fronts.wire_params import encode_params
from quire.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Time limit of calls that the engine's process answers at once, unless it hangs.
CALL_TIMEOUT_S: Final = 10.0


class RemoteStream:
    """The outputs of one request."""

    __slots__ = ("_last", "_metrics", "_prompt", "_request_id", "_texts", "_tokenizer", "mailbox")

    def __init__(
        self,
        request_id: str,
        prompt: PreparedRequest,
        tokenizer: Tokenizer | None,
        texts: FrontTexts | None,
        take: Callable[[RequestOutput], bool] | None,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt.prompt
        self._tokenizer = tokenizer
        self._texts = texts
        # Times that all deltas share, and the last delta with more than text.
        self._metrics = RequestMetrics()
        self._last: DeltaRow | None = None
        self.mailbox = OutputMailbox(take)

    def take(self, row: Row) -> bool:
        """Take a row; return True for the last one."""
        if isinstance(row, TextRow):
            self.mailbox.put(self._more(row.text, row.token_ids))
            return False
        if not isinstance(row, DeltaRow):
            self.mailbox.put(decode_error(row.error))
            return True
        for name in self._metrics.__slots__:
            setattr(self._metrics, name, getattr(row.metrics, name))
        row.metrics, self._last = self._metrics, row
        text, token_ids = self._prompt.text, self._prompt.token_ids
        delta = read_delta(row, self._request_id, text, token_ids, self._tokenizer)
        if self._texts is not None:
            for output in delta.outputs:
                self._texts.add_text(output)
        self.mailbox.put(delta)
        return row.finished

    def take_tokens(self, token_ids: list[int]) -> None:
        """Take more tokens of the first sample."""
        text = "" if self._texts is None else self._texts.push(0, token_ids)
        self.mailbox.put(self._more(text, token_ids))

    def _more(self, text: str, token_ids: list[int]) -> RequestOutput:
        last = self._last
        assert last is not None
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[CompletionOutput(0, text, token_ids)],
            num_cached_tokens=last.num_cached_tokens,
            num_disk_tokens=last.num_disk_tokens,
            cache_hit_end=last.cache_hit_end,
            cache_differs_at=last.cache_differs_at,
            prompt_account=last.prompt_account,
            metrics=self._metrics,
        )


class RemotePlace:
    """Slots of the engine's waiting queue for several prompts; the engine refuses them at the first of the requests."""

    def __init__(self, peer: Peer, number: int | None) -> None:
        self._peer = peer
        self.number = number

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number is not None:
            self._peer.send(ReleaseSlots(self.number))


class RemoteAdapters:
    """The adapters of the engine; see `AdapterClient`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def list_loaded(self) -> tuple[LoadedAdapter, ...]:
        """Return the loaded adapters."""
        found = await self._peer.call("list_adapters", timeout_s=CALL_TIMEOUT_S)
        return tuple(LoadedAdapter(**fields) for fields in found)

    async def load(self, lora_request: LoRARequest) -> LoadedAdapter:
        """Load an adapter."""
        request = lora_request
        fields = await self._peer.call("load_adapter", request.lora_name, request.lora_path, request.load_inplace)
        return LoadedAdapter(**fields)

    async def unload(self, lora_name: str) -> None:
        """Unload an adapter."""
        await self._peer.call("unload_adapter", lora_name)


class RemoteEngine:
    """A client of the engine's process; see `EngineClient`."""

    def __init__(self, peer: Peer, welcome: Welcome, gauge: QueueGauge) -> None:
        self.model_name = welcome.model_name
        self.resolved = welcome.resolved
        self.tokenizer = None if welcome.tokenizer is None else Tokenizer.from_parts(welcome.tokenizer)
        self.pooling = read_pooling_fields(welcome.pooling)
        resolved = self.resolved
        prompts = PromptReader(
            self.tokenizer, resolved.vocab_size, resolved.max_model_len, is_encoder=resolved.is_encoder
        )
        reader = RequestBuilder(resolved, prompts, None, frozenset(welcome.end_token_ids), self.model_name)
        self.texts = TokenizerPool(reader, self.tokenizer, resolved.max_model_len, resolved.sanitize_control_tokens)
        self.adapters = RemoteAdapters(peer)
        self.has_failed = False
        self.silent_s = 0.0
        self.http_requests: Counter[tuple[str, str, int]] = Counter()
        self._defaults = welcome.default_params
        self._peer = peer
        self._gauge = gauge
        self._numbers = itertools.count(1)
        self._streams: dict[int, RemoteStream] = {}
        self._used_s = time.thread_time()

    # ---- requests ----

    def reserve(self, count: int) -> RemotePlace:
        """Reserve slots of the waiting queue, as far as this process can know; see `AsyncLLM.reserve`."""
        self._check_alive()
        self._check_room(count)
        if count == 1:
            return RemotePlace(self._peer, None)
        place = RemotePlace(self._peer, next(self._numbers))
        assert place.number is not None
        self._peer.send(ReserveSlots(place.number, count))
        return place

    def check_room(self) -> None:
        """Check that the waiting queue has a free slot."""
        self._check_room(1)

    async def stream(
        self,
        prompt: PreparedRequest,
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
        place: RemotePlace,
        take: Callable[[RequestOutput], bool] | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate, as a stream of output deltas; see `AsyncLLM.generate`."""
        self._check_alive()
        adapter = options.lora_request
        sent = asdict(replace(options, lora_request=None)) | {"lora_name": adapter and adapter.lora_name}
        number = next(self._numbers)
        texts = None
        if self.tokenizer is not None and FrontTexts.can_make(params):
            texts = FrontTexts(params, self.tokenizer, prompt.prompt.token_ids)
        stream = self._streams[number] = RemoteStream(request_id, prompt, self.tokenizer, texts, take)
        try:
            self._peer.send(
                Submit(
                    stream=number,
                    request_id=request_id,
                    token_ids=prompt.prompt.token_ids,
                    text=prompt.prompt.text,
                    words=prompt.words,
                    params=encode_params(params, detokenize=texts is None and params.detokenize),
                    options=json.dumps(sent),
                    pooling=prompt.pooling,
                    place=place.number,
                    arrival_s=time.monotonic(),
                )
            )
            is_finished = False
            while not is_finished:
                output = await stream.mailbox.next()
                is_finished = output.finished
                yield output
        finally:
            # It is listed until its last row has arrived.
            if self._streams.pop(number, None) is not None and not self._peer.is_gone:
                self._peer.send(AbortStream(number))

    async def has_added(self, request_ids: Sequence[str]) -> bool:
        """Return whether the engine has all of these requests; see `AsyncLLM.has_added`."""
        return bool(await self._peer.call("has_added", list(request_ids)))

    async def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        cache_salt: str | None,
        *,
        tenant: str | None,
        add_special_tokens: bool,
        lora_request: LoRARequest | None,
    ) -> int:
        """Keep a prompt's whole blocks in the prefix cache; see `AsyncLLM.pin_prefix`."""
        (read,) = await self.texts.prepare([prompt], ONE_TOKEN, add_special_tokens=add_special_tokens)
        adapter = None if lora_request is None else lora_request.lora_name
        num_tokens = await self._peer.call("pin_prefix", name, read.prompt.token_ids, cache_salt, tenant, adapter)
        return int(num_tokens)

    async def unpin_prefix(self, name: str, tenant: str | None) -> None:
        """Unpin a prefix."""
        await self._peer.call("unpin_prefix", name, tenant)

    def reset_prefix_cache(self) -> asyncio.Task[None]:
        """Drop all cached prefixes."""
        return asyncio.get_running_loop().create_task(self._peer.call("reset_prefix_cache"))

    # ---- state ----

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config sets."""
        return dict(self._defaults)

    async def report(self) -> EngineReport:
        """Return the health, the memory and the totals of the engine."""
        if self.silent_s > HUNG_AFTER_S and not self._peer.is_gone:
            raise NoAnswer("the engine's process", self.silent_s)
        return msgspec.convert(await self._peer.call("report", timeout_s=CALL_TIMEOUT_S), EngineReport)

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """Count an answered HTTP request, until the counts are sent."""
        self.http_requests[route, method, status] += 1

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and return whether those in progress ended in time."""
        try:
            return bool(await self._peer.call("drain", timeout_s, timeout_s=timeout_s + CALL_TIMEOUT_S))
        except WorkerError:
            return False

    # ---- called by the owner of the peer ----

    def take(self, message: Message) -> None:
        """Take the deltas of a message."""
        assert isinstance(message, Outputs)
        used_s = time.thread_time()
        self._peer.send(Acknowledge(used_s - self._used_s))
        self._used_s = used_s
        streams = self._streams
        for number, token_ids in zip(message.streams, message.token_ids, strict=True):
            stream = streams.get(number)
            if stream is not None:
                try:
                    stream.take_tokens(token_ids)
                except Exception as error:
                    self._end_broken(number, error)
        for row in message.rows:
            stream = streams.get(row.stream)
            if stream is not None:
                try:
                    is_last = stream.take(row)
                except Exception as error:
                    self._end_broken(row.stream, error)
                else:
                    if is_last:
                        del streams[row.stream]

    def _end_broken(self, number: int, error: Exception) -> None:
        """End one stream whose output cannot be taken; the others go on."""
        logger.error("the output of a request cannot be taken, so the request ends", exc_info=error)
        self._streams.pop(number).mailbox.put(error)
        self._peer.send(AbortStream(number))

    def fail(self, error: WorkerError) -> None:
        """Take the end of the engine: every stream ends with an error, and no request is accepted any more."""
        self.has_failed = True
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.mailbox.put(error)

    def take_http_requests(self) -> list[Any]:
        """Return the HTTP requests since the last call: route, method, status and count."""
        counts, self.http_requests = self.http_requests, Counter()
        return [(*key, count) for key, count in counts.items()]

    def _check_alive(self) -> None:
        if self.has_failed or self._peer.is_gone:
            raise WorkerError("the engine does not run")

    def _check_room(self, count: int) -> None:
        limit = self.resolved.max_queue_len
        if limit is not None and count <= limit < self._gauge.num_taken + count:
            raise QueueFull(limit, self._gauge.retry_after_s)
