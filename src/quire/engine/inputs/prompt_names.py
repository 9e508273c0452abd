"""Names of prompts and conversations in errors, as the callers of `LLM` know them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import RequestError, renamed

# Name of the field with a prompt's images, as in vLLM.
IMAGES = "multi_modal_data"


def prompt_name(idx: int, count: int) -> str | None:
    """Return the name of one of `count` prompts; None if there is only one, which needs no index."""
    return f"prompts[{idx}]" if count > 1 else None


@contextmanager
def naming_prompt(name: str | None) -> Iterator[None]:
    """Let an error about a prompt that is raised within the context name the prompt."""
    try:
        yield
    except RequestError as error:
        field = error.field or ""
        is_media = field.startswith("media")
        if name is None or not (is_media or field in ("prompt", "prompt_token_ids")):
            raise
        raise renamed(error, f"{name}.{field}" if is_media else name, name) from None


@contextmanager
def naming_conversation(idx: int, count: int) -> Iterator[None]:
    """Let an error about a conversation that is raised within the context name `messages`, with an index if needed."""
    name = f"messages[{idx}]" if count > 1 else "messages"
    try:
        yield
    except RequestError as error:
        root, mark, suffix = (error.field or "").partition("[")
        if root not in ("prompt", "messages"):
            raise
        raise renamed(error, f"{name}{mark}{suffix}", name if count > 1 else "") from None
