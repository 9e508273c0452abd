"""The formats of tool calls, and the choice of a model's format."""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tool_calls.deepseek import DeepSeek
from quire.text.tool_calls.gemma4 import Gemma4
from quire.text.tool_calls.harmony import HarmonyCalls
from quire.text.tool_calls.hermes import Hermes
from quire.text.tool_calls.lfm2 import Lfm2
from quire.text.tool_calls.llama3 import Llama3
from quire.text.tool_calls.mistral import Mistral
from quire.text.tool_calls.parser import ToolFormat
from quire.text.tool_calls.qwen3_xml import Qwen3Xml

# By name: the constructor of the format from a template, and the test whether a template shows the format.
FORMATS: dict[str, tuple[Callable[[str], ToolFormat], Callable[[str], bool]]] = {
    "deepseek": (DeepSeek.for_template, DeepSeek.is_shown_by),
    "gemma4": (Gemma4.for_template, Gemma4.is_shown_by),
    "harmony": (HarmonyCalls.for_template, HarmonyCalls.is_shown_by),
    "hermes": (Hermes.for_template, Hermes.is_shown_by),
    "lfm2": (Lfm2.for_template, Lfm2.is_shown_by),
    "llama3": (Llama3.for_template, Llama3.is_shown_by),
    "mistral": (Mistral.for_template, Mistral.is_shown_by),
    "qwen3_xml": (Qwen3Xml.for_template, Qwen3Xml.is_shown_by),
}


def choose_format(name: str, template: str) -> ToolFormat | None:
    """Return a model's format."""
    if name != "auto":
        return FORMATS[name][0](template)
    matching = [make(template) for make, is_shown in FORMATS.values() if is_shown(template)]
    return matching[0] if len(matching) == 1 else None
