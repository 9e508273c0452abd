"""The benchmark of what an ambiguous grammar costs others sees its request end, and others served until then."""

from __future__ import annotations

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from benchmarks.grammar_delay import AMBIGUOUS, beside
from quire import LLM
from quire.text.structured.grammar_state import TOO_SLOW


def test_a_row_says_how_others_fared_until_the_grammar_was_ended() -> None:
    llm = LLM("bundled", num_threads=1, max_model_len=1024, max_num_seqs=64, num_kv_blocks=2048)
    row = beside(llm, 32, {"grammar": AMBIGUOUS})
    assert row["error"] == TOO_SLOW
    assert 0 < min(row["times_s"]) <= max(row["times_s"])
    assert row["longest_s"] <= max(row["times_s"])
    assert llm.usage().used == 0
    llm.close()
