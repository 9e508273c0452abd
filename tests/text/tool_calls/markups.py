"""The formats of calls, each with the first of its markups or another one."""

from __future__ import annotations

from quire.text.tool_calls import FORMATS, ToolFormat
from quire.text.tool_calls.formats import DEEPSEEK_FENCED, MISTRAL_IDS, MISTRAL_NAMED, MarkupFormat

OTHERS = {"fenced": DEEPSEEK_FENCED, "ids": MISTRAL_IDS, "named": MISTRAL_NAMED}


def form_of(name: str, markup: str = "") -> ToolFormat:
    """Return a format that writes one of `OTHERS`, or its first markup if none is named."""
    form = FORMATS[name]
    if not markup:
        return form
    assert isinstance(form, MarkupFormat)
    return form.led_by(OTHERS[markup])
