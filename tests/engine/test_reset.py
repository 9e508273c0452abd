"""A reset of the prefix cache of a running engine."""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.memory import check

PROMPT = list(range(10, 110))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_a_reset_keeps_running_requests_and_forgets_old_blocks() -> None:
    llm = LLM("bundled", num_kv_blocks=64, max_model_len=256, num_threads=1)
    expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    engine = llm.engine
    engine.add_request("a", PROMPT, GREEDY)
    tokens: list[int] = []
    for _ in range(20):
        tokens += [token for output in engine.step() for token in output.outputs[0].token_ids]
    llm.reset_prefix_cache()
    check(engine.scheduler.memory)
    engine.add_request("b", PROMPT, GREEDY)
    cached = {}
    while engine.has_unfinished:
        for output in engine.step():
            cached[output.request_id] = output.num_cached_tokens
            if output.request_id == "a":
                tokens += output.outputs[0].token_ids
        check(engine.scheduler.memory)
    assert tokens == expected
    assert cached == {"a": 0, "b": 0}
    assert llm.usage().used == 0
    (after,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert after.num_cached_tokens == len(PROMPT) - 1
    assert after.outputs[0].token_ids == expected
