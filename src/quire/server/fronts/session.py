"""The engine's side of one front: its requests, its calls, and where its outputs go."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.inputs.prompts import TokenPrompt
from quire.engine.inputs.request_builder import PreparedRequest
from quire.engine.inputs.request_options import RequestOptions
from quire.sequences.lora import LoRARequest
from quire.server.admission.in_flight import FirstTokenLog
from quire.server.fronts.engine_methods import EngineMethods
from quire.server.fronts.messages import AbortStream, Acknowledge, Message, ReleaseSlots, ReserveSlots, Submit
from quire.server.fronts.output_sender import OutputSender, SentStream
from quire.server.fronts.peer import Peer
from quire.server.fronts.wire_params import decode_params

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_commands import Stream
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.queue_slots import SlotReservation


class FrontSession:
    """One front, as long as its process runs."""

    def __init__(
        self,
        llm: AsyncLLM,
        connected: socket.socket,
        name: str,
        methods: EngineMethods,
        first_tokens: FirstTokenLog,
        on_notice: Callable[[str, Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._llm = llm
        self._submitter = llm.submitter
        self._first_tokens = first_tokens
        self._on_end = on_end
        self._watchers = methods.watchers()
        self._on_notice = on_notice
        by_name = {**methods.by_name, **self._watchers.by_name}
        self.peer = Peer(connected, name, by_name, self._take, self._note, self._end)
        self._sender = OutputSender(self.peer)
        self._streams: dict[int, Stream | asyncio.Task[None]] = {}
        self._places: dict[int, SlotReservation | Exception] = {}

    def close(self) -> None:
        """End the front's requests, and close the socket to it."""
        self.peer.close()
        self._watchers.close()
        for number in tuple(self._streams):
            self._abort(number)
        for place in tuple(self._places):
            self._release(place)

    def _end(self) -> None:
        self.close()
        self._on_end()

    def _note(self, kind: str, value: Any) -> None:
        if kind == "leave":
            self._watchers.leave(value)
        else:
            self._on_notice(kind, value)

    def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._start(message.stream, self._submit(message))
        elif isinstance(message, Acknowledge):
            self._sender.acknowledge(message.busy_s)
        elif isinstance(message, AbortStream):
            self._abort(message.stream)
        elif isinstance(message, ReserveSlots):
            try:
                self._places[message.place] = self._submitter.reserve(message.count)
            except Exception as error:
                self._places[message.place] = error
        elif isinstance(message, ReleaseSlots):
            self._release(message.place)
        else:
            raise ValueError(f"a front sent {type(message).__name__}")

    def _start(self, number: int, submitting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(submitting)
        self._streams[number] = task

    async def _submit(self, message: Submit) -> None:
        """Submit a request; an error goes to its stream only."""
        number, stream = message.stream, SentStream(message.stream, message.arrival_s)
        try:
            place = None if message.place is None else self._places[message.place]
            if isinstance(place, Exception):
                raise place
            fields = json.loads(message.options)
            name = fields.pop("lora_name")
            options = RequestOptions(**fields | {"lora_request": None if name is None else LoRARequest(name)})
            stream.tenant = options.tenant
            prompt = TokenPrompt(message.token_ids, message.text)
            self._streams[number] = await self._submitter.submit(
                PreparedRequest(prompt, message.words, message.pooling),
                decode_params(message.params),
                options,
                self._sender,
                partial(self._deliver, stream),
                place=place,
                request_id=message.request_id,
                arrival_s=message.arrival_s,
            )
            # The engine's thread may have ended the request meanwhile.
            if stream.is_over:
                self._streams.pop(number, None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._streams.pop(number, None)
            self._sender.fail(stream, error)

    def _deliver(self, stream: SentStream, item: Any) -> None:
        """Pass an item of a stream on; called by the engine's thread."""
        if not stream.has_item and not isinstance(item, Exception):
            self._first_tokens.append(stream.tenant, time.monotonic() - stream.arrival_s)
        stream.has_item = True
        if isinstance(item, Exception) or item.finished:
            stream.is_over = True
            self._streams.pop(stream.number, None)
        self._sender.add(stream, item)

    def _abort(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if isinstance(stream, asyncio.Task):
            stream.cancel()
        elif stream is not None:
            self._submitter.abandon(stream)

    def _release(self, place: int) -> None:
        held = self._places.pop(place, None)
        if held is not None and not isinstance(held, Exception):
            held.__exit__(None, None, None)
