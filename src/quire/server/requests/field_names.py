"""Names of fields in errors, as in the protocol that the client uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from quire.errors import RequestError, renamed
from quire.server.requests.fields import Fields


@contextmanager
def renaming(rename: Callable[[str], str]) -> Iterator[None]:
    """Let an error that is raised within the context have the client's name of its field."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, None if error.field is None else rename(error.field)) from None


def naming_prompt(fields: Fields) -> AbstractContextManager[None]:
    """Let an error about the prompt that is raised within the context name the client's field."""
    name = "prompt" if fields.get("messages") is None else "messages"
    return renaming(lambda field: name if field in ("prompt", "prompt_token_ids") else field)
