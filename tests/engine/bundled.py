"""The bundled model, for tests of forms and of thinking."""

from __future__ import annotations

from typing import Any

from quire import LLM


def load(**options: Any) -> LLM:
    """Load the bundled model, in float32: how many rows are computed together makes no difference that shows."""
    usual: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256, "num_threads": 1, "max_model_len": 512}
    return LLM(**(usual | {"max_num_seqs": 16} | options))
