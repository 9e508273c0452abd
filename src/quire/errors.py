"""Every error that Quire raises on purpose.

Expected outcomes are return values; a user's mistake is a `ConfigError` or a `RequestError` that names the
field, the value and what is allowed; a broken fact of our own is an `InvariantViolation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Characters of a value that a message shows.
MAX_SHOWN = 120
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def shown(value: object) -> str:
    """Return a value as a message shows it: as `repr` does, but at most `MAX_SHOWN` characters.

    Nothing behind these characters is looked at, so neither time nor stack grows with the value.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_SHOWN:
            return f"{text[: MAX_SHOWN - 3]}..."
    return text


def _pieces(value: Any) -> Iterator[str]:
    """Yield `repr(value)` in pieces, of a long string its beginning only."""
    kind = type(value)
    if kind in (str, bytes):
        yield repr(value[: MAX_SHOWN + 1])
    elif kind is dict:
        yield "{"
        for idx, (key, item) in enumerate(value.items()):
            yield ", " if idx else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif kind in _BRACKETS and value:
        opening, closing = _BRACKETS[kind]
        yield opening
        for idx, item in enumerate(value):
            yield ", " if idx else ""
            yield from _pieces(item)
        yield f",{closing}" if kind is tuple and len(value) == 1 else closing
    else:
        yield _whole(value)


def _whole(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # an integer of too many digits, an object whose own repr fails
        return f"<{type(value).__name__}>"


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception; the type alone where its own `__str__` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


# The error of a row of logits of which every token is excluded, and of a beam search without candidates.
NO_TOKEN = (
    "no token is left to sample after structured_outputs, allowed_token_ids, logit_bias, min_tokens, bad_words,"
    " penalties and logits_processors"
)


class QuireError(Exception):
    """The root of all errors that Quire raises on purpose."""


class ConfigError(QuireError):
    """An engine option, or a combination of options, that cannot be honoured.

    Args:
        message: what was wrong, with both numbers and the option to change.
        field: the option's name as the user typed it, where one option is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read: a missing file or tensor, a wrong shape, a truncated file."""


class UnsupportedModel(ConfigError):
    """A model architecture that no family implements; the message lists the supported ones."""


class LogError(QuireError):
    """A file that is not a log of memory commands, or one of a version that cannot be replayed."""


class TraceError(QuireError):
    """A file of requests that cannot be read or sent; the message names the file, the line and the field."""


class ServerUnreachable(QuireError):
    """A server that does not answer, or refuses everything that it is asked."""


class RequestError(QuireError):
    """A request that is refused. It never touches another request.

    Attributes:
        field: the parameter to blame, or None.
        code: a short machine-readable reason, used as the OpenAI error code.
    """

    code: str = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidParameter(RequestError):
    """A parameter outside its range or of the wrong type.

    Args:
        field: the parameter's name.
        value: what was given (shown shortened).
        allowed: what would have been accepted, in words.
    """

    code = "invalid_parameter"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, got {shown(value)}", field=field)
        self.value = value
        self.allowed = allowed


class PromptTooLong(RequestError):
    """A prompt that leaves no room for a single new token.

    Args:
        num_tokens: the prompt's length in tokens.
        limit: the longest prompt that would have been accepted, in tokens.
        reason: which limit that is (the context length, the KV cache).
        is_exact: False where the prompt may be longer still.
    """

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, reason: str, *, is_exact: bool = True) -> None:
        count = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
        super().__init__(f"the prompt has {count} tokens but {reason} allows at most {limit}", field="prompt")
        self.num_tokens = num_tokens
        self.limit = limit


class UnsupportedFeature(RequestError):
    """A parameter that is known but that this engine or model cannot honour."""

    code = "unsupported_feature"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} is not supported: {why}", field=field)


class UnknownParameter(RequestError, TypeError):
    """A sampling parameter that does not exist here; a `TypeError` too, as for any unknown argument."""

    code = "unknown_parameter"


class RequestFailed(RequestError):
    """A request that failed on what it asked for: a grammar that goes no further, say, or no token that is allowed."""

    code = "request_failed"


class QueueFull(RequestError):
    """The waiting queue has no place left; the client should come back later.

    Args:
        limit: how many requests may wait.
        retry_after_s: when to try again, in seconds.
    """

    code = "queue_full"

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the server's queue is full ({limit} requests); retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TextsFull(QueueFull):
    """Too many characters of texts wait to be made into tokens; the client should come back later.

    Args:
        limit: characters that may wait.
    """

    def __init__(self, limit: int) -> None:
        RequestError.__init__(self, f"texts of {limit:,} characters wait to be made into tokens; retry after 1 s")
        self.retry_after_s = 1


class PinLimitReached(RequestError):
    """A prefix that would pin more memory than may be pinned.

    Args:
        needed: slabs (with one cache group: blocks) that all pins would fill.
        limit: slabs that they may fill.
    """

    code = "pin_limit_reached"

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(
            f"all pins together would fill {needed} blocks, and pin_limit allows {limit}; unpin another prefix",
            field="prompt",
        )
        self.needed = needed
        self.limit = limit


class OutOfMemory(QuireError):
    """Memory that was promised could not be had."""


class WorkerError(QuireError):
    """The data plane failed while it executed a step."""


class EngineClosed(WorkerError):
    """An engine that was closed was asked for something; load another one."""


class InvariantViolation(QuireError):
    """A numbered invariant (M1 to M11, S1 to S6) does not hold: a bug in Quire, never a user's mistake.

    Args:
        number: the invariant, for example "M2".
        detail: what was found and what was expected.
    """

    def __init__(self, number: str, detail: str) -> None:
        super().__init__(f"invariant {number}: {detail}")
        self.number = number
