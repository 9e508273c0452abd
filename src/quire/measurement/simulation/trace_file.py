"""Traffic from a file: one JSON object a line, with lengths and hashes of prefixes, or with token ids.

Mooncake's traces have `timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids`: a number for each
512 tokens of the prompt, equal if the prompts are equal up to the end of this piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import TraceError, shown
from quire.measurement.simulation.replicas.tokens import MAX_STREAMS, TokenSpan
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.traffic import MAX_LENGTH, MAX_REQUESTS

MAX_LINE = 1 << 24
HASH_BLOCK_TOKENS = 512


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e12  # type: ignore[arg-type, operator]


def _is_length(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_LENGTH


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_LENGTH
        and all(type(number) is int and number >= 0 for number in value)
    )


def _is_priority(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 31


# Description of the allowed values of a field, and their check.
Field = tuple[str, Callable[[object], bool]]
_LENGTH = f"a whole number from 1 to {MAX_LENGTH}"
FIELDS: Mapping[str, Field] = {
    "timestamp": ("a number of milliseconds from 0 to 1e12", _is_time),
    "arrival_s": ("a number of seconds from 0 to 1e12", _is_time),
    "input_length": (_LENGTH, _is_length),
    "prompt_token_ids": ("a list of token ids that is not empty", lambda value: _are_ids(value) and bool(value)),
    "hash_ids": ("a list of whole numbers of at least 0", _are_ids),
    "output_length": (_LENGTH, _is_length),
    "max_tokens": (_LENGTH, _is_length),
    "priority": ("a whole number", _is_priority),
}
# A line has exactly one of each group.
ALTERNATIVES = (("timestamp", "arrival_s"), ("input_length", "prompt_token_ids"), ("output_length", "max_tokens"))


class TraceTraffic:
    """The requests of a trace.

    Args:
        lines: lines of the file, read once; empty ones are skipped.
        name: name of the file, for errors.
        hash_block: tokens of a prompt for each of its `hash_ids`.
        block_size: block size of the memory; prompts of token ids are compared in pieces of this size.
        time_scale: factor of all arrival times; 0.5 doubles the rate.
        max_context: most tokens of a prompt and its output, as the engine has it: longer outputs are cut, and prompts
            that leave no room for one are left out. None for no limit.

    Raises:
        TraceError: a line is wrong; the message names the file, the line and the field.
    """

    def __init__(
        self,
        lines: Iterable[str],
        name: str,
        *,
        hash_block: int = HASH_BLOCK_TOKENS,
        block_size: int = 16,
        time_scale: float = 1.0,
        max_context: int | None = None,
    ) -> None:
        self._hash_block = hash_block
        self._block_size = block_size
        # Identity of a piece of a prompt -> its stream.
        self._streams: dict[object, int] = {}
        self._num_streams = 0
        rows: list[SimulatedRequest] = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                if len(rows) >= MAX_REQUESTS:
                    raise TraceError(f"{name} line {number}: there must be at most {MAX_REQUESTS:,} requests")
                rows.append(self._read(line, f"{name} line {number}"))
        if not rows:
            raise TraceError(f"{name} has no requests")
        first_s = min(row.arrival_s for row in rows)
        self.num_shortened = self.num_too_long = 0
        self.rows = [
            fitting._replace(arrival_s=(row.arrival_s - first_s) * time_scale)
            for row in sorted(rows, key=lambda row: row.arrival_s)
            if (fitting := self._fitted(row, max_context)) is not None
        ]

    def requests(self) -> Iterator[SimulatedRequest]:
        """Yield the requests in the order of their arrivals."""
        return iter(self.rows)

    def follow_up(self, ended: SimulatedRequest, now_s: float) -> SimulatedRequest | None:  # noqa: ARG002
        """Return None, because the trace has all requests."""
        return None

    def _fitted(self, row: SimulatedRequest, max_context: int | None) -> SimulatedRequest | None:
        """Return a request within the longest context; None if its prompt leaves no room for a new token."""
        if max_context is None:
            return row
        room = max_context - row.num_prompt
        self.num_too_long += room < 1
        self.num_shortened += 1 <= room < row.num_new
        return row._replace(num_new=min(row.num_new, room)) if room >= 1 else None

    def _read(self, line: str, where: str) -> SimulatedRequest:
        values = checked_line(line, where, FIELDS, ALTERNATIVES)
        arrival_s = values["arrival_s"] if "arrival_s" in values else values["timestamp"] / 1000
        if "prompt_token_ids" in values:
            if "hash_ids" in values:
                raise TraceError(f"{where}: hash_ids must not stand beside prompt_token_ids, got both")
            prompt = self._of_ids(values["prompt_token_ids"])
        else:
            prompt = self._of_hashes(values["input_length"], values.get("hash_ids", []), where)
        num_new = values["output_length"] if "output_length" in values else values["max_tokens"]
        if self._num_streams >= MAX_STREAMS - 1:
            raise TraceError(f"{where}: there must be at most {MAX_STREAMS:,} pieces of prompts")
        return SimulatedRequest(float(arrival_s), prompt, num_new, self._new(), priority=values.get("priority", 0))

    def _of_hashes(self, num_prompt: int, hash_ids: list[int], where: str) -> tuple[TokenSpan, ...]:
        """Return the spans of a prompt whose pieces have hashes; tokens after the last piece get a new stream."""
        size = self._hash_block
        most = -(-num_prompt // size)
        if len(hash_ids) > most:
            raise TraceError(
                f"{where}: hash_ids must have at most {most} numbers for {num_prompt} tokens in pieces of {size}, got "
                f"{len(hash_ids)}"
            )
        spans = []
        for idx, hash_id in enumerate(hash_ids):
            length = min(size, num_prompt - idx * size)
            # The last piece may be shorter: its hash identifies these tokens only.
            spans.append(TokenSpan(self._of(hash_id if length == size else (hash_id, length)), 0, length))
        num_left = num_prompt - size * len(hash_ids)
        return (*spans, TokenSpan(self._new(), 0, num_left)) if num_left > 0 else tuple(spans)

    def _of_ids(self, token_ids: list[int]) -> tuple[TokenSpan, ...]:
        """Return the spans of a prompt of token ids: one for each block, identified by all tokens up to its end."""
        spans, parent = [], -1
        for start in range(0, len(token_ids), self._block_size):
            piece = tuple(token_ids[start : start + self._block_size])
            parent = self._of((parent, piece))
            spans.append(TokenSpan(parent, 0, len(piece)))
        return tuple(spans)

    def _of(self, identity: object) -> int:
        stream = self._streams.get(identity)
        if stream is None:
            stream = self._streams[identity] = self._new()
        return stream

    def _new(self) -> int:
        self._num_streams += 1
        return self._num_streams


def checked_line(
    line: str, where: str, fields: Mapping[str, Field], alternatives: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Parse a line, and check that all fields are known and in their ranges.

    Args:
        line: JSON text of an object; a field that is null counts as absent.
        where: name of the file and number of the line, for errors.
        fields: allowed values of each field.
        alternatives: groups of fields, of each of which the line has exactly one.

    Raises:
        TraceError: the line is wrong; the message names the field.
    """
    if len(line) > MAX_LINE:
        raise TraceError(f"{where}: it must have at most {MAX_LINE:,} characters, got {len(line):,}")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: it is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise TraceError(f"{where}: it must be an object, got {shown(values)}")
    unknown = next((name for name in values if name not in fields), None)
    if unknown is not None:
        raise TraceError(f"{where}: {shown(unknown)} is not a field; there are {', '.join(fields)}")
    values = {name: value for name, value in values.items() if value is not None}
    for names in alternatives:
        present = [name for name in names if name in values]
        if len(present) != 1:
            what = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
            raise TraceError(f"{where}: there must be {what}, got {' and '.join(present) or 'none'}")
    for name, value in values.items():
        allowed, is_right = fields[name]
        if not is_right(value):
            raise TraceError(f"{where}: {name} must be {allowed}, got {shown(value)}")
    return values
