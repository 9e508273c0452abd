"""The bundled model's engine, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.llm import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    llm = LLM("bundled", num_threads=1, num_kv_blocks=128, max_model_len=512)
    yield llm
    llm.close()
