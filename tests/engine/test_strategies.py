"""Strategies of a request's own, and steps that give several tokens at once, on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.decoding import Append, Edit, Finish, Fork, Sampling
from quire.distributed.executor import Executor
from quire.errors import InvalidParameter
from quire.scheduling.plan import StepPlan, StepResult
from quire.sequences import FinishReason
from quire.sequences.sequence import Sequence as TokenSequence

STORY = "Once upon a time, a small fox"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm = LLM(num_kv_blocks=128, num_threads=1, max_model_len=512, max_num_seqs=8)
    yield llm
    assert llm.usage().used == 0


class Scripted:
    """Samples, and adds one more edit behind the fifth token.

    Args:
        edit: what to add; an exception is raised.
    """

    def __init__(self, edit: Edit | Exception) -> None:
        self.edit = edit

    def num_draws(self, sequence: TokenSequence) -> int:
        return Sampling().num_draws(sequence)

    def advance(self, sequence: TokenSequence, token_ids: Sequence[int]) -> list[Edit]:
        edits = list(Sampling().advance(sequence, token_ids))
        if sequence.num_output == 4:
            if isinstance(self.edit, Exception):
                raise self.edit
            edits.append(self.edit)
        return edits


def test_a_strategy_ends_its_own_request(llm: LLM) -> None:
    strategy = Scripted(Finish(0, FinishReason.STOP, "enough"))
    ended, plain = llm.generate(
        [STORY] * 2, [SamplingParams(**GREEDY, strategy=strategy), SamplingParams(**GREEDY)], use_tqdm=False
    )
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", "enough")
    assert ended.outputs[0].token_ids == plain.outputs[0].token_ids[:5]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (ValueError("no idea"), "the strategy raised ValueError: no idea"),
        (Append(3, 0), "the strategy raised IndexError"),
        (Append(0, 7), "the strategy raised IndexError"),
        (Finish(1, FinishReason.STOP), "the strategy raised IndexError"),
        (Fork(1, 5), "the strategy raised IndexError"),
    ],
)
def test_a_strategy_that_fails_costs_nobody_else_anything(llm: LLM, edit: Edit | Exception, said: str) -> None:
    plain = SamplingParams(**GREEDY)
    alone = llm.generate(STORY, plain, use_tqdm=False)[0].outputs[0].token_ids
    failing = SamplingParams(**GREEDY, strategy=Scripted(edit))
    before, failed, after = llm.generate([STORY] * 3, [plain, failing, plain], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert said in (failed.error or "")
    assert before.outputs[0].token_ids == after.outputs[0].token_ids == alone


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="strategy must be an object with the methods num_draws and advance"):
        SamplingParams(strategy="beam")  # type: ignore[arg-type]


class Eager:
    """Gives a sequence the tokens that it will have, up to three at once, as drafts and grammars do.

    Args:
        executor: gives one token in a step.
        token_ids: prompt and output that come of that.
    """

    def __init__(self, executor: Executor, token_ids: list[int]) -> None:
        self.executor = executor
        self.token_ids = token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        items = []
        for item, outcome in zip(plan.items, result.items, strict=True):
            end = item.start + len(item.token_ids)
            more = self.token_ids[end + 1 : end + 3] if outcome.token_ids else []
            items.append(outcome._replace(token_ids=(*outcome.token_ids, *more)))
        return result._replace(items=tuple(items))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 40])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop": ["fox"], "min_tokens": 3},
        {"stop": ["a"], "include_stop_str_in_output": True},
        {"stop_token_ids": [19]},
        {"stop_token_ids": [19], "stop": ["river."]},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_tokens_that_come_together_are_taken_one_by_one(llm: LLM, changes: dict[str, Any], max_tokens: int) -> None:
    params = SamplingParams(**GREEDY | {"max_tokens": max_tokens}, **changes)
    free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, min_tokens=params.min_tokens)
    (one_by_one,) = llm.generate(STORY, params, use_tqdm=False)
    (known,) = llm.generate(STORY, free, use_tqdm=False)
    num_steps = llm.engine.num_steps
    llm.engine.executor = Eager(llm.engine.executor, known.prompt_token_ids + known.outputs[0].token_ids)
    *_, last = deltas = list(llm.stream(STORY, params))
    assert "".join(delta.outputs[0].text for delta in deltas) == one_by_one.outputs[0].text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == one_by_one.outputs[0].token_ids
    (output,), (expected,) = last.outputs, one_by_one.outputs
    assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert llm.engine.num_steps - num_steps <= 1 + len(expected.token_ids) // 3 + 1
