"""Reads a request's JSON body: bounded, strict, and refused in words."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request

from quire.server.errors import ApiError

# An escape of a UTF-16 surrogate; only a body that has one can hold a lone one.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read the body as one JSON object.

    Args:
        request: its body was not read before.
        max_bytes: the longest body.

    Raises:
        ApiError: 415 not sent as JSON, 413 too long, 400 not a JSON object in UTF-8.
    """
    check_json(request)
    return parse_object(await _read(request, max_bytes))


def check_json(request: Request) -> None:
    """Check that a request says that its body is JSON.

    Raises:
        ApiError: 415, it does not.
    """
    # Pages of other sites can send plain text to a server on this machine, but not this type.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, got {content_type[:100] or 'none'}",
            code="unsupported_media_type",
        )


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse JSON as RFC 8259 has it: no NaN, no infinity, no lone surrogates; the top is an object.

    Raises:
        ApiError: 400 with the reason.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if SURROGATE.search(raw):
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise _bad_json("a string holds half of a surrogate pair") from error
    except RecursionError as error:
        raise _bad_json("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise _bad_json(str(error)) from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise _too_long(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "a number"


def _bad_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes} bytes", code="content_too_large")
