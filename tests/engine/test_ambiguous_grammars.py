"""An ambiguous grammar ends its own request before it delays others for long."""

from __future__ import annotations

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, SamplingParams, StructuredOutputs
from quire.text.structured.grammar_state import TOO_SLOW

END_IDS = (1, 5)  # of the bundled model
AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "c" | " " e | e " "'


def test_its_request_ends_and_others_get_their_tokens() -> None:
    llm = LLM("bundled", num_threads=1, max_model_len=512, max_num_seqs=16, num_kv_blocks=512, dtype="float32")
    other = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (alone,) = llm.generate("Once upon a time", other, use_tqdm=False)
    bias = dict.fromkeys(END_IDS, -100.0)  # so that none of its samples ends before
    form = StructuredOutputs(grammar=AMBIGUOUS)
    ambiguous = SamplingParams(n=8, seed=1, max_tokens=400, structured_outputs=form, logit_bias=bias)
    failed, beside = llm.generate(["abc", "Once upon a time"], [ambiguous, other], use_tqdm=False)
    assert (failed.error, failed.error_code) == (TOO_SLOW, "request_failed")
    assert {sample.finish_reason for sample in failed.outputs} == {"error"}
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert llm.usage().used == 0
    llm.close()
