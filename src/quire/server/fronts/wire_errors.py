"""Errors as JSON: their type, message and fields, so that a front answers as the engine's process would."""

from __future__ import annotations

import json
from typing import Any, Final

from quire import errors
from quire.errors import QuireError, describe, shown
from quire.server.requests.errors import ApiError

_KNOWN: Final[dict[str, type[Exception]]] = {
    name: kind
    for name, kind in {**vars(errors), "ApiError": ApiError}.items()
    if isinstance(kind, type) and issubclass(kind, QuireError | ApiError)
}


class ShownValue:
    """A value of another process, of which only the text is known."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def encode_error(error: BaseException) -> str:
    """Return an error as JSON; of one that is neither Quire's nor an `ApiError`, the type and the message."""
    name = type(error).__name__
    if _KNOWN.get(name) is not type(error):
        return json.dumps({"type": None, "message": describe(error)})
    return json.dumps({"type": name, "message": str(error), "fields": _fields(error)})


def decode_error(text: str) -> Exception:
    """Return the error of `encode_error`; of an unknown type, a `RuntimeError`."""
    given = json.loads(text)
    kind = _KNOWN.get(given["type"])
    if kind is None:
        return RuntimeError(given["message"])
    # Constructors differ, and make messages of their arguments; this one is made already.
    error = kind.__new__(kind)
    error.args = (given["message"],)
    fields = given["fields"]
    if "value" in fields:
        fields["value"] = ShownValue(fields["value"])
    vars(error).update(fields)
    return error


def _fields(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an error; a value of a client, of any type and size, as text."""
    return {name: shown(value) if name == "value" else value for name, value in vars(error).items()}
