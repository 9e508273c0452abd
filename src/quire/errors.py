"""Exceptions of Quire.

Expected outcomes are return values. A mistake of the user is a `ConfigError` or a `RequestError` that names the field,
the value and the allowed values. A bug in Quire is an `InvariantViolation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Exit code of a process that ends because of a `QuireError`.
EXIT_USER_ERROR = 2
# Maximum length of a value in a message, in characters.
MAX_SHOWN = 120
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def shown(value: object) -> str:
    """Return the `repr` of a value, cut to `MAX_SHOWN` characters.

    The rest of the value is not read, so neither time nor stack depth grows with its size.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_SHOWN:
            return f"{text[: MAX_SHOWN - 3]}..."
    return text


def _pieces(value: Any) -> Iterator[str]:
    """Yield `repr(value)` in pieces; a long string is cut."""
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
    """Return the type and the message of an exception; only the type if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


# Error of a row of logits that excludes every token, and of a beam search without candidates.
NO_TOKEN = (
    "no token is left to sample after structured_outputs, allowed_token_ids, logit_bias, min_tokens, bad_words,"
    " penalties and logits_processors"
)


class QuireError(Exception):
    """Base class of all exceptions of Quire."""


class ConfigError(QuireError):
    """An engine option, or a combination of options, that cannot be honoured.

    Args:
        message: description of the error, with both numbers and the option to change.
        field: name of the option as the user wrote it, if a single option is wrong; else None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read: a missing file or tensor, a wrong shape, a truncated file."""


class UnsupportedModel(ConfigError):
    """A model architecture that no family implements, or a form of one."""


class RanksDiffer(ConfigError):
    """Ranks of a model that cannot share it: an option, a file or a version differs; the message names both values."""


class LogError(QuireError):
    """A file that is not a log of memory commands, or a log of a version that cannot be replayed."""


class TraceError(QuireError):
    """A file of requests that cannot be read or sent; the message names the file, the line and the field."""


class ServerUnreachable(QuireError):
    """A server that does not answer, or refuses every request."""


class RequestError(QuireError):
    """A request that is refused; other requests are not affected.

    Args:
        message: description of the error.
        field: name of the wrong parameter, or None.

    Attributes:
        code: short machine-readable reason, used as the OpenAI error code.
        prompt_idx: index of the refused prompt, if several were given together; None if it is unknown.
    """

    code: str = "invalid_request"
    prompt_idx: int | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidParameter(RequestError):
    """A parameter outside its range or of the wrong type.

    Args:
        field: name of the parameter.
        value: given value (cut in the message).
        allowed: description of the allowed values.
    """

    code = "invalid_parameter"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, got {shown(value)}", field=field)
        self.value = value
        self.allowed = allowed


def renamed(error: RequestError, field: str | None, prompt: str = "") -> RequestError:
    """Return an error with the caller's name of the field.

    Args:
        error: the error, which may be changed.
        field: the caller's name of the field.
        prompt: the caller's name of the prompt that caused the error, if there are several; it is put in front of a
            message that does not begin with the field.
    """
    if isinstance(error, InvalidParameter):
        return error if field == error.field else InvalidParameter(field or "", error.value, error.allowed)
    if prompt:
        error.args = (f"{prompt}: {error}",)
    error.field = field
    return error


class InvalidAdapter(RequestError):
    """An adapter that cannot be loaded or used; the message names the file, the field or the name, and the reason."""

    code = "invalid_adapter"


class OutOfAdapterMemory(InvalidAdapter):
    """An adapter for which a GPU has no memory left, after the KV cache, the largest step and other adapters."""


class UnknownAdapter(InvalidAdapter):
    """An adapter that is not loaded.

    Args:
        name: name of the adapter.
    """

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"the adapter {shown(name)} is not loaded", field="lora_name")


class PromptTooLong(RequestError):
    """A prompt that leaves no room for a new token.

    Args:
        num_tokens: length of the prompt in tokens.
        limit: length of the longest accepted prompt, in tokens.
        reason: name of the limit (the context length, the KV cache).
        is_exact: False if `num_tokens` is a lower bound.
    """

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, reason: str, *, is_exact: bool = True) -> None:
        count = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
        super().__init__(f"the prompt has {count} tokens but {reason} allows at most {limit}", field="prompt")
        self.num_tokens = num_tokens
        self.limit = limit


class UnsupportedFeature(RequestError):
    """A known parameter that this engine or model cannot honour.

    Args:
        field: name of the parameter.
        why: the reason.
    """

    code = "unsupported_feature"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} is not supported: {why}", field=field)
        self.why = why


class UnsupportedPart(UnsupportedFeature):
    """A part of a prompt that the model does not read, or not in this place: an image, audio, a video or a file.

    Args:
        field: name of the part.
        kind: its type, as the request states it.
        model: name of the model.
    """

    def __init__(self, field: str, kind: object, model: str = "the model") -> None:
        super().__init__(field, f"{model} reads no parts of type {shown(kind)} here")
        self.kind = kind

    def of_model(self, name: str) -> UnsupportedPart:
        """Return the error with the name of the model."""
        return UnsupportedPart(self.field or "", self.kind, f"the model {shown(name)}")


class UnknownParameter(RequestError, TypeError):
    """A sampling parameter that does not exist; also a `TypeError`, as for any unknown argument."""

    code = "unknown_parameter"


class RequestFailed(RequestError):
    """A request that failed because of its parameters: a grammar without a next token, or no allowed token."""

    code = "request_failed"


class QueueFull(RequestError):
    """The waiting queue is full; the client should retry later.

    Args:
        limit: maximum number of waiting requests.
        retry_after_s: suggested delay before a retry, in seconds.
    """

    code = "queue_full"

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the server's queue is full ({limit} requests); retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TextsFull(QueueFull):
    """Too many characters of prompts wait to be tokenized; the client should retry later.

    Args:
        limit: maximum number of waiting characters.
    """

    def __init__(self, limit: int) -> None:
        RequestError.__init__(self, f"texts of {limit:,} characters wait to be made into tokens; retry after 1 s")
        self.retry_after_s = 1


class ImagesFull(QueueFull):
    """Too many bytes of images wait to be encoded; the client should retry later.

    Args:
        limit: maximum number of waiting bytes.
    """

    def __init__(self, limit: int) -> None:
        RequestError.__init__(self, f"images of {limit >> 20:,} MiB wait to be encoded; retry after 1 s")
        self.retry_after_s = 1


class PinLimitReached(RequestError):
    """A prefix whose pin would exceed `pin_limit`.

    Args:
        needed: number of slabs (with one cache group: blocks) that all pins would fill.
        limit: maximum number of slabs for pins.
    """

    code = "pin_limit_reached"

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(
            f"all pins together would fill {needed} blocks, and pin_limit allows {limit}; unpin another prefix",
            field="prompt",
        )
        self.needed = needed
        self.limit = limit


class WorkerError(QuireError):
    """The data plane failed while it executed a step."""


class DeviceFailed(WorkerError):
    """A GPU failure after which this process cannot use the GPU any more."""


class EngineClosed(WorkerError):
    """A call of a closed engine; load another one."""


class RankFailed(WorkerError):
    """A rank of a model that several processes share has ended, or does not answer; no rank can continue.

    Args:
        rank: number of the rank; None if it may be one of several.
        why: description of the failure.
    """

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(f"{'a rank' if rank is None else f'rank {rank}'} {why}; all ranks of the model end")
        self.rank = rank
        self.why = why


class LockstepDrift(WorkerError):
    """The plan or the block tables of a rank differ from rank 0: a bug in Quire, never a user's mistake."""


class InvariantViolation(QuireError):
    """A numbered invariant (M1 to M11, S1 to S6) does not hold: a bug in Quire, never a user's mistake.

    Args:
        number: number of the invariant, for example "M2".
        detail: description of the violation, with the found and the expected value.
    """

    def __init__(self, number: str, detail: str) -> None:
        super().__init__(f"invariant {number}: {detail}")
        self.number = number
