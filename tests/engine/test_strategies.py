"""Custom strategies, and steps that give several tokens at once, on the bundled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter
from quire.execution.runners.executor import Executor
from quire.scheduling.plan import LaunchedStep, StepPlan
from quire.sequences import FinishReason
from quire.sequences.decoding import Append, Drop, Edit, Fail, Finish, Fork, Sampling, Truncate
from quire.sequences.sequence import Sequence as TokenSequence

STORY = "Once upon a time, a small fox"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def llm() -> Iterator[LLM]:
    # In float32: rounding to bfloat16 leaves ties between words, which the number of rows of a step decides.
    llm = LLM(dtype="float32", num_kv_blocks=128, num_threads=1, max_model_len=512, max_num_seqs=8)
    yield llm
    assert llm.usage().used == 0


class Scripted:
    """Samples, and adds something behind the fifth token.

    Args:
        more: an edit, a list of edits, or a function of the sequence that gives edits or raises.
    """

    def __init__(self, more: Any) -> None:
        self.more = more

    def num_draws(self, sequence: TokenSequence) -> int:
        return Sampling().num_draws(sequence)

    def advance(self, sequence: TokenSequence, token_ids: Sequence[int]) -> Any:
        edits = list(Sampling().advance(sequence, token_ids))
        if sequence.num_output != 4:
            return edits
        if callable(self.more):
            return self.more(sequence)
        return [*edits, *self.more] if isinstance(self.more, list) else [*edits, self.more]


class FromPrompt:
    """Samples, but for what comes of a prompt.

    Args:
        edits: of the prompt's step.
        draws: what `num_draws` returns; an exception is raised.
    """

    def __init__(self, edits: list[Edit], draws: Any = 1) -> None:
        self.edits = edits
        self.draws = draws

    def num_draws(self, sequence: TokenSequence) -> Any:  # noqa: ARG002
        if isinstance(self.draws, Exception):
            raise self.draws
        return self.draws

    def advance(self, sequence: TokenSequence, token_ids: Sequence[int]) -> Sequence[Edit]:  # noqa: ARG002
        if sequence.num_output:
            return [Append(sequence.sample_idx, 0), *([] if sequence.num_output < 9 else [stop(sequence.sample_idx)])]
        return self.edits


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


class Unshowable:
    def __repr__(self) -> str:
        raise TypeError("no looks")


def stop(sample_idx: int) -> Finish:
    return Finish(sample_idx, FinishReason.STOP, "scripted")


def raises(error: Exception) -> Callable[[TokenSequence], Any]:
    def more(_: TokenSequence) -> Any:
        raise error

    return more


def for_ever(_: TokenSequence) -> Iterator[Edit]:
    while True:
        yield Append(0, 0)


def late(_: TokenSequence) -> Iterator[Edit]:
    yield Append(0, 0)
    raise KeyError("late")


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def fail_alone(llm: LLM, strategy: Any, said: str, **params: Any) -> RequestOutput:
    """Have a strategy fail between others, which get the tokens that they get without it; return its output."""
    others = [SamplingParams(**GREEDY), SamplingParams(n=2, seed=3, temperature=0.9, max_tokens=24)]
    expected = [
        [sample.token_ids for sample in one.outputs] for one in llm.generate([STORY] * 2, others, use_tqdm=False)
    ]
    failing = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params}, strategy=strategy)
    before, failed, after = llm.generate([STORY] * 3, [others[0], failing, others[1]], use_tqdm=False)
    assert tokens([before, after]) == expected
    assert before.error is after.error is None
    assert said in (failed.error or "")
    assert failed.error_code == "request_failed"
    assert not llm.engine.has_unfinished
    assert not llm.engine.scheduler.has_unfinished
    return failed


def test_a_strategy_ends_its_own_request(llm: LLM) -> None:
    strategy = Scripted(Finish(0, FinishReason.STOP, "enough"))
    ended, plain = llm.generate(
        [STORY] * 2, [SamplingParams(**GREEDY, strategy=strategy), SamplingParams(**GREEDY)], use_tqdm=False
    )
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", "enough")
    assert ended.outputs[0].token_ids == plain.outputs[0].token_ids[:5]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (raises(ValueError("no idea")), "the strategy raised ValueError: no idea"),
        (raises(Unspeakable()), "the strategy raised Unspeakable"),
        (late, "the strategy raised KeyError: 'late'"),
        (lambda _: None, "the strategy raised TypeError: 'NoneType' object is not iterable"),
        (lambda _: 7, "the strategy raised TypeError"),
        (lambda _: [], "the strategy gave sample 0 neither a token nor an end"),
        (for_ever, "prompt and output have 29 tokens, which is the limit"),
        ([stop(0), stop(0)], "no such sample is running"),
        ([stop(0), Append(0, 0)], "no such sample is running"),
        ([Append(0, 0)] * 16, "which is the limit"),
        (Append(3, 0), "Append(sample_idx=3, draw_idx=0): no such sample is running"),
        (Append(-1, 0), "no such sample is running"),
        (Append("0", 0), "no such sample is running"),  # type: ignore[arg-type]
        (Append(True, 0), "no such sample is running"),
        (Append(0, 7), "the step gave 1 token"),
        (Append(0, -1), "the step gave 1 token"),
        (Append(0, 0.0), "the step gave 1 token"),  # type: ignore[arg-type]
        (Finish(1, FinishReason.STOP), "no such sample is running"),
        (Finish(0, "stop"), "the reason must be one of ABORT, LENGTH, STOP"),  # type: ignore[arg-type]
        (Finish(0, []), "the reason must be one of ABORT, LENGTH, STOP"),  # type: ignore[arg-type]
        (Finish(0, FinishReason.DROPPED), "the reason must be one of ABORT, LENGTH, STOP"),
        (Finish(0, FinishReason.ERROR), "the reason must be one of ABORT, LENGTH, STOP"),
        (Finish(0, FinishReason.STOP, 0.5), "the stop_reason must be text or a token id"),  # type: ignore[arg-type]
        (Fork(1, 5), "before it has output"),
        (Fork(1, 0), "before it has output"),
        (Truncate(0, 3), "an edit is an Append, a Fork, a Finish or a Fail"),
        (Drop(0), "an edit is an Append, a Fork, a Finish or a Fail"),  # type: ignore[arg-type]
        (None, "the strategy returned None: an edit is"),
        ("append", "the strategy returned 'append': an edit is"),
        (Unshowable(), "the strategy returned an object of Unshowable: an edit is"),
        (Fail("enough is enough"), "enough is enough"),
        (Fail(3), "the error must be text"),  # type: ignore[arg-type]
    ],
)
def test_a_strategy_that_fails_costs_nobody_else_anything(llm: LLM, more: Any, said: str) -> None:
    fail_alone(llm, Scripted(more), said)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("no idea"), Unspeakable()], ids=repr)
def test_one_sample_fails_for_all_of_its_request(llm: LLM, failing: int, error: Exception) -> None:
    """The others of its samples get tokens in the same step, before it and behind it."""

    def more(sequence: TokenSequence) -> Sequence[Edit]:
        if sequence.sample_idx == failing:
            raise error
        return [Append(sequence.sample_idx, 0)]

    failed = fail_alone(
        llm, Scripted(more), f"the strategy raised {type(error).__name__}", n=3, seed=1, temperature=1.0
    )
    assert {sample.finish_reason for sample in failed.outputs} == {"error"}
    # Those behind it in the step are not given its token.
    assert [len(sample.token_ids) for sample in failed.outputs] == [5 if idx < failing else 4 for idx in range(3)]


@pytest.mark.parametrize("draws", [0, -1, None, "3", 10**9, 2.0, True, [], RuntimeError("no idea")], ids=str)
def test_draws_that_cannot_be_drawn_fail_their_own_request(llm: LLM, draws: Any) -> None:
    said = "the strategy raised RuntimeError: no idea" if isinstance(draws, Exception) else "num_draws must return 1 to"
    assert fail_alone(llm, FromPrompt([Append(0, 0)], draws), said).outputs[0].token_ids == []


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([], "the strategy gave sample 0 neither a token nor an end"),
        ([Fork(1, 0), Append(0, 0)], "the strategy gave sample 1 neither a token nor an end"),
        ([Fork(2, 0), Append(0, 0)], "the next sample is 1"),
        ([Fork(0, 0)], "the next sample is 1"),
        ([Fork(-1, 0)], "the next sample is 1"),
        ([Fork("1", 0)], "the next sample is 1"),  # type: ignore[arg-type]
        ([Fork(1, 1)], "only a sample of this step can be forked"),
        ([Append(0, 0), Fork(1, 0)], "before it has output"),
        ([stop(0), Fork(1, 0)], "only a sample of this step can be forked"),
        ([Fork(1, 0), Fork(2, 0), Fork(3, 0)], "the request has all of its samples (n is 3)"),
    ],
    ids=str,
)
def test_forks_that_cannot_be_made_fail_their_own_request(llm: LLM, edits: list[Edit], said: str) -> None:
    fail_alone(llm, FromPrompt(edits), said, n=3)


def test_a_class_is_no_strategy(llm: LLM) -> None:
    fail_alone(llm, Sampling, "the strategy raised TypeError")


def test_samples_fork_off_forks_and_draws_are_chosen(llm: LLM) -> None:
    usual = SamplingParams(n=3, seed=1, max_tokens=10, ignore_eos=True)
    expected = [sample.token_ids for sample in llm.generate(STORY, usual, use_tqdm=False)[0].outputs]
    chain: list[Edit] = [Fork(1, 0), Fork(2, 1), Append(2, 2), Append(0, 0), Append(1, 1)]
    params = SamplingParams(n=3, seed=1, max_tokens=10, ignore_eos=True, strategy=FromPrompt(chain, 3))
    (forked,) = llm.generate(STORY, params, use_tqdm=False)
    assert [sample.token_ids for sample in forked.outputs] == expected
    params = SamplingParams(seed=1, max_tokens=10, ignore_eos=True, strategy=FromPrompt([Append(0, 2)], 3))
    (chosen,) = llm.generate(STORY, params, use_tqdm=False)
    assert chosen.outputs[0].token_ids[0] == expected[2][0]


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

    def launch(self, plan: StepPlan) -> LaunchedStep:
        result = self.executor.launch(plan).result()
        items = []
        for item, outcome in zip(plan.items, result.items, strict=True):
            end = item.start + len(item.token_ids)
            more = self.token_ids[end + 1 : end + 3] if outcome.token_ids else []
            items.append(outcome._replace(token_ids=(*outcome.token_ids, *more)))
        return LaunchedStep(lambda: result._replace(items=tuple(items)))

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
