"""Sends the deltas of one front's streams: those of a step together, merged while the front is behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.outputs.mailbox import Item
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import WorkerError
from quire.server.fronts.messages import ErrorRow, Outputs, Row, TextRow
from quire.server.fronts.peer import Peer
from quire.server.fronts.wire_errors import encode_error
from quire.server.fronts.wire_outputs import delta_row, is_plain

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_commands import Stream
    from quire.engine.delta_pacer import DeltaPacer

logger = logging.getLogger(__name__)

# Messages with outputs that the front has not read yet; later deltas are merged until it has.
MAX_UNACKNOWLEDGED: Final = 2


@dataclass(slots=True, eq=False)
class SentStream:
    """A stream of a front.

    Args:
        number: its number, chosen by the front.
        arrival_s: time of the request's arrival, in seconds of the monotonic clock.
        tenant: tenant of its client.
        has_item: True once an item was delivered.
        has_begun: True once the front knows all but further text.
        is_over: True once its last item was delivered.
    """

    number: int
    arrival_s: float
    tenant: str | None = None
    has_item: bool = False
    has_begun: bool = False
    is_over: bool = False


class OutputSender:
    """The sink of all streams of one front.

    The engine's thread adds deltas and sends them; a front that reads slowly costs one merged delta for each stream.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._deltas: dict[SentStream, RequestOutput] = {}
        self._errors: dict[SentStream, Exception] = {}
        self._num_unacknowledged = 0
        self._pacer: DeltaPacer | None = None

    def post(self, items: Sequence[tuple[Stream, Item]], pacer: DeltaPacer | None) -> None:
        """Add items and send them, unless the front is behind; called by the engine's thread."""
        with self._lock:
            self._pacer = pacer or self._pacer
            for stream, item in items:
                stream.deliver(item)
            self._send()

    def add(self, stream: SentStream, item: Item) -> None:
        """Add an item of a stream; called by `post` as the stream's `deliver`."""
        if isinstance(item, Exception):
            self._errors[stream] = item
            return
        known = self._deltas.get(stream)
        if known is None:
            self._deltas[stream] = item
        elif is_plain(known) and is_plain(item):
            (output,), (more,) = known.outputs, item.outputs
            output.text += more.text
            output.token_ids += more.token_ids
        else:
            known.add(item)

    def fail(self, stream: SentStream, error: Exception) -> None:
        """Send the error that ends a stream."""
        with self._lock:
            self._errors[stream] = error
            self._send()

    def acknowledge(self, busy_s: float) -> None:
        """Note that the front has read a message, and send what has waited for that."""
        with self._lock:
            self._num_unacknowledged -= 1
            if self._pacer is not None:
                self._pacer.on_report(busy_s)
            self._send()

    def _send(self) -> None:
        if not (self._deltas or self._errors) or self._num_unacknowledged >= MAX_UNACKNOWLEDGED:
            return
        deltas, self._deltas = self._deltas, {}
        errors, self._errors = self._errors, {}
        rows: list[Row] = []
        streams: list[int] = []
        token_ids: list[list[int]] = []
        for stream, delta in deltas.items():
            if not stream.has_begun or not is_plain(delta):
                stream.has_begun = True
                rows.append(delta_row(stream.number, delta))
                continue
            (output,) = delta.outputs
            if output.text:
                rows.append(TextRow(stream.number, output.text, output.token_ids))
            else:
                streams.append(stream.number)
                token_ids.append(output.token_ids)
        rows += [ErrorRow(stream.number, encode_error(error)) for stream, error in errors.items()]
        try:
            self._peer.send(Outputs(rows, streams, token_ids))
        except Exception as error:
            # A delta that cannot be sent must not end the engine's thread.
            logger.exception("the outputs of %d streams cannot be sent to their front", len(rows) + len(streams))
            why = encode_error(WorkerError(f"an output cannot be sent: {error}"))
            self._peer.send(Outputs([ErrorRow(number, why) for number in (*(row.stream for row in rows), *streams)]))
        self._num_unacknowledged += 1
