"""Quire serves large language models from paged memory.

In three lines:

    from quire import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM
    from quire.engine.outputs.logprobs import Logprob
    from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
    from quire.sequences.params import SamplingParams
    from quire.text.tool_calls import ToolCall

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ToolCall",
    "__version__",
]

_HOMES = {
    "LLM": "quire.engine.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "CompletionOutput": "quire.engine.outputs.outputs",
    "Logprob": "quire.engine.outputs.logprobs",
    "RequestOutput": "quire.engine.outputs.outputs",
    "SamplingParams": "quire.sequences.params",
    "ToolCall": "quire.text.tool_calls",
}

# Nothing here needs numpy, so it is not installed; torch complains about that when it is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


def __getattr__(name: str) -> Any:
    # Exports are looked up on first use, so that the control plane can be imported without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
