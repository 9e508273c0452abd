"""Submission of requests to the thread of an engine: a slot, the adapter, tokens and grammar, then the queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from quire.engine.async_adapters import AsyncAdapters
from quire.engine.async_commands import Abort, Stream
from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.exporters.prometheus import Metrics
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_builder import PreparedRequest
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.inputs.tokenizer_pool import TokenizerPool
from quire.engine.outputs.mailbox import Item
from quire.engine.queue_slots import QueueSlots, SlotReservation
from quire.errors import InvalidParameter, RequestError
from quire.sequences.params import SamplingParams


class Submitter:
    """Submits requests from event loops to the thread of an engine."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        slots: QueueSlots,
        texts: TokenizerPool,
        adapters: AsyncAdapters,
        metrics: Metrics,
    ) -> None:
        self.is_draining = self.is_closed = False
        self._engine, self._thread, self._slots = engine, thread, slots
        self._texts, self._adapters, self._metrics = texts, adapters, metrics
        # Part of generated request ids, so that they differ from the callers' own.
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def reserve(self, count: int) -> SlotReservation:
        """Reserve slots of the waiting queue; see `AsyncLLM.reserve`."""
        if self.is_closed or (self._thread.has_ended and not self.is_draining):
            raise self._thread.dead()
        return self._slots.reserve(count)

    async def submit(
        self,
        prompt: Prompt | PreparedRequest,
        params: SamplingParams,
        options: RequestOptions,
        deliver: Callable[[Item], None],
        *,
        place: SlotReservation | None = None,
        request_id: str | None = None,
        on_end: Callable[[Engine], None] | None = None,
    ) -> Stream:
        """Submit a request, once its texts are tokens, and return its stream to the running event loop."""
        # Refused before a slot is reserved and texts are made into tokens, which cost more.
        self._engine.config.check_priority(options.priority)
        if request_id is not None and (type(request_id) is not str or not request_id):
            raise InvalidParameter("request_id", request_id, "a non-empty string")
        arrival_s = time.monotonic()

        def add(engine: Engine) -> None:
            engine.add_request(name, prompt, params, asked, arrival_s=arrival_s)
            self._metrics.on_request(params)

        with self.reserve(1) if place is None else contextlib.nullcontext(place) as reservation:
            asked = options
            if options.lora_request is not None:
                asked = replace(options, lora_request=await self._adapters.ready(options.lora_request))
            if not isinstance(prompt, PreparedRequest):
                special = options.add_special_tokens
                (prompt,) = await self._texts.prepare([prompt], params, add_special_tokens=special)
            grammars, grammar = self._engine.grammars, None
            if grammars is not None and params.structured_outputs is not None:
                grammar = await grammars.wait_for(params.structured_outputs)
            if self.is_draining:
                raise RequestError("the engine is shutting down and takes no new requests")
            name = f"request-{next(self._numbers)}-{self._name}" if request_id is None else request_id
            stream = Stream(name, add, asyncio.get_running_loop(), deliver, on_end, grammar=grammar)
            reservation.take()
            self._slots.put()
            self._thread.put(stream)
        # A command that the thread's final drain of the queue missed gets no answer: `has_ended` is set by then.
        if self._thread.has_ended:
            raise self._thread.dead()
        return stream

    def abandon(self, stream: Stream) -> None:
        """Abort the request of a stream that is not read any more, unless the request has ended."""
        if not self._thread.has_ended:
            self._thread.put(Abort(stream))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for requests in progress; see `AsyncLLM.drain`."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._thread.streams or self._slots.num_unstarted:
            if asyncio.get_running_loop().time() > deadline or not self._thread.is_alive:
                return False
            await asyncio.sleep(0.02)
        return True
