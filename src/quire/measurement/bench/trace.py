"""Requests for a server, and the trace files that contain them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import TraceError
from quire.measurement.simulation.trace_file import Field, checked_line
from quire.platform.bounded.files import reason_of

MAX_TOKENS = 2**31 - 1

Messages = list[dict[str, Any]]


class TracedRequest(NamedTuple):
    """A request for a server.

    Args:
        prompt: text, token ids, or messages of a chat.
        max_tokens: maximum number of new tokens.
        arrival_s: arrival time in seconds from any origin; None if the trace has no times.
    """

    prompt: str | list[int] | Messages
    max_tokens: int
    arrival_s: float | None = None

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a list of chat messages."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)


def read_trace(path: str) -> list[TracedRequest]:
    """Read a file of one JSON object a line: `prompt`, `prompt_token_ids` or `messages`; `max_tokens`; `arrival_s`.

    Returns:
        The requests, in the order of the lines.

    Raises:
        TraceError: the file is unreadable or invalid; the message names the file, the line and the field.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {reason_of(error)}") from error
    if not lines:
        raise TraceError(f"{path} has no requests")
    requests = [_read_line(line, f"{path} line {number}") for number, line in lines]
    is_timed = requests[0].arrival_s is not None
    for (number, _), request in zip(lines, requests, strict=True):
        if (request.arrival_s is not None) != is_timed:
            raise TraceError(f"{path} line {number}: arrival_s must be in all lines, or in none of them")
    return requests


def _read_line(line: str, where: str) -> TracedRequest:
    fields = checked_line(line, where, FIELDS, (PROMPTS, ("max_tokens",)))
    prompt = next(fields[name] for name in PROMPTS if name in fields)
    return TracedRequest(prompt, fields["max_tokens"], fields.get("arrival_s"))


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token_id) is int and token_id >= 0 for token_id in value)
    )


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and "role" in message for message in value)
    )


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


PROMPTS: Sequence[str] = ("prompt", "prompt_token_ids", "messages")
FIELDS: Mapping[str, Field] = {
    "prompt": ("text that is not empty", lambda value: isinstance(value, str) and bool(value)),
    "prompt_token_ids": ("a list of token ids that is not empty", _are_ids),
    "messages": ("a list of objects with a role that is not empty", _are_messages),
    "max_tokens": ("a whole number of at least 1", _is_count),
    "arrival_s": ("a number of seconds of at least 0", _is_time),
}
