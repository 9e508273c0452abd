"""Events of a stream that are written in the call that brings their delta, without waking the stream's task.

A task that is woken for a delta passes the event loop twice, and several generators; with many streams of a fast model
that costs more than the event. Only further text is written this way, and only while the task waits and nothing is
unread, so the order is kept. The task writes the first event, the last ones, errors, long texts, and all events for a
client that reads slowly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from quire.engine.outputs.outputs import RequestOutput
from quire.server.admission.stream_merge import StreamMerger
from quire.server.admission.usage import TokenCount
from quire.server.http.json_stream import PLACEHOLDER, JsonWriter

if TYPE_CHECKING:
    from quire.server.http.transport import BodyWriter

# Longer texts, which slow clients get, are written in pieces by the stream's task.
MAX_CHARS: Final = 4096


class Framing(Protocol):
    """Form of a stream; see `sse.StreamFormat`."""

    def framed(self, chunk: Mapping[str, Any], writer: JsonWriter) -> Iterable[str]:
        """Return the event of a chunk."""


class StreamReply(Protocol):
    """Maker of the chunks of a stream; see `generation.Reply`."""

    @property
    def stream_format(self) -> Framing:
        """Form of its streams."""

    def chunks(self, prompt_idx: int, delta: RequestOutput, count: TokenCount) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a delta, whose tokens have been counted."""


class DirectEvents:
    """Writes the events of one answer."""

    __slots__ = ("_count", "_frames", "_json", "_merger", "_reply", "_text_chunk", "writer")

    def __init__(
        self,
        reply: StreamReply,
        count: TokenCount,
        merger: StreamMerger,
        text_chunk: Callable[[int, int, str], dict[str, Any] | None] | None = None,
    ) -> None:
        self._reply = reply
        self._count = count
        self._merger = merger
        self._text_chunk = text_chunk
        self._json = JsonWriter(ascii_only=True)
        # Beginning and end of the event of a sample's further text, by prompt and sample.
        self._frames: dict[tuple[int, int], tuple[str, str]] = {}
        self.writer: BodyWriter | None = None

    def take(self, prompt_idx: int, delta: RequestOutput) -> bool:
        """Write the events of a delta of one prompt while the stream's task waits; return False to leave it to that."""
        writer = self.writer
        if writer is None or not writer.can_write or not _is_short_text(delta):
            return False
        try:
            self._count.add(prompt_idx, delta)
            events = self._events(prompt_idx, delta)
            if events:
                writer.write(events.encode())
                self._merger.touch()
        except Exception as error:  # of this answer; the caller has deltas of others
            self._merger.fail(error)
        return True

    def _events(self, prompt_idx: int, delta: RequestOutput) -> str:
        """Return the events of a delta."""
        if len(delta.outputs) == 1 and self._text_chunk is not None:
            (output,) = delta.outputs
            frame = self._frame(prompt_idx, output.index)
            if frame is not None:
                before, after = frame
                return f"{before}{json.dumps(output.text)}{after}" if output.text else ""
        form = self._reply.stream_format
        parts: list[str] = []
        for chunk in self._reply.chunks(prompt_idx, delta, self._count):
            parts += form.framed(chunk, self._json)
        return "".join(parts)

    def _frame(self, prompt_idx: int, sample_idx: int) -> tuple[str, str] | None:
        """Return the beginning and the end of an event with further text; None if more than the text changes."""
        frame = self._frames.get((prompt_idx, sample_idx))
        if frame is None and self._text_chunk is not None:
            chunk = self._text_chunk(prompt_idx, sample_idx, PLACEHOLDER)
            if chunk is None:
                return None
            before, after = "".join(self._reply.stream_format.framed(chunk, self._json)).split(f'"{PLACEHOLDER}"')
            frame = self._frames[prompt_idx, sample_idx] = before, after
        return frame


def _is_short_text(delta: RequestOutput) -> bool:
    """Return whether a delta is further text only."""
    if delta.finished or delta.prompt_logprobs is not None:
        return False
    num_chars = 0
    for output in delta.outputs:
        if output.finish_reason is not None or output.logprobs is not None:
            return False
        num_chars += len(output.text) + len(output.token_ids)
    return num_chars <= MAX_CHARS
