"""The formats that there are, and which one a model speaks."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tool_calls.hermes import Hermes
from quire.text.tool_calls.llama3 import Llama3
from quire.text.tool_calls.mistral import Mistral
from quire.text.tool_calls.parser import ToolFormat

# By name: what makes the format for a model's template, and what tells whether a template shows it.
FORMATS: dict[str, tuple[Callable[[str], ToolFormat], Callable[[str], bool]]] = {
    "hermes": (Hermes.for_template, Hermes.is_spoken_by),
    "llama3": (Llama3.for_template, Llama3.is_spoken_by),
    "mistral": (Mistral.for_template, Mistral.is_spoken_by),
}


def choose_format(name: str, template: str) -> ToolFormat | None:
    """Return a model's format.

    Args:
        name: one of `FORMATS`, or "auto" for the one that the template shows.
        template: the source of the chat template with which tools are written.

    Returns:
        None where it shows none of them, or several.
    """
    if name != "auto":
        return FORMATS[name][0](template)
    spoken = [make(template) for make, is_spoken in FORMATS.values() if is_spoken(template)]
    return spoken[0] if len(spoken) == 1 else None
