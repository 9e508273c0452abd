"""The offline interface, on the bundled model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.outputs.outputs import RequestMetrics
from quire.engine.startup import loading
from quire.errors import ConfigError, InvalidParameter, PromptTooLong, UnsupportedFeature, WorkerError
from quire.execution.runners.executor import Executor
from quire.memory.results import MemoryOps
from quire.scheduling.plan import LaunchedStep, StepPlan

STORIES = ["Once upon a time, a small fox", "Tom found a red kite", "The old sailor", "Once upon a time, a small fox"]
# What keeps the prefixes of requests apart.
NAMES = ("cache_salt", "tenant")


def load(**options: Any) -> LLM:
    """Load the bundled model with a small pool on one thread."""
    return LLM(**({"num_kv_blocks": 128, "num_threads": 1, "max_model_len": 512} | options))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return one engine for tests that leave nothing behind, and see that they do not."""
    llm = load()
    yield llm
    assert llm.usage().used == 0
    assert not llm.engine.has_unfinished


@pytest.fixture(scope="module")
def bare() -> LLM:
    """Return an engine without a tokenizer."""
    return load(skip_tokenizer_init=True)


def greedy(max_tokens: int = 12, **params: Any) -> SamplingParams:
    """Return greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(STORIES, greedy(), use_tqdm=False)
    assert [output.prompt for output in outputs] == STORIES
    assert outputs[0].outputs[0].text == outputs[3].outputs[0].text
    assert all(output.finished and output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
    assert all(0 < len(output.outputs[0].token_ids) <= 12 for output in outputs)


def test_more_threads_than_cores_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "num_cores", lambda: 1)
    with load(num_threads=1, skip_tokenizer_init=True):
        assert "num_threads is" not in caplog.text
    with load(num_threads=2, skip_tokenizer_init=True):
        pass
    assert "num_threads is 2, above the number of cores that this process may use, which is 1" in caplog.text
    torch.set_num_threads(1)  # as the engines of this module have it


def test_every_form_of_prompt_gives_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = STORIES[0]
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    alone = [llm.generate(form, greedy(), use_tqdm=False)[0].outputs[0].text for form in forms]
    together = [output.outputs[0].text for output in llm.generate(forms, greedy(), use_tqdm=False)]
    assert len(set(alone + together)) == 1


def test_text_is_that_of_the_whole_output(llm: LLM) -> None:
    assert llm.tokenizer is not None
    for output in llm.generate(STORIES, greedy(40), use_tqdm=False):
        sample = output.outputs[0]
        assert sample.text == llm.tokenizer.decode(sample.token_ids)


def test_stream_yields_deltas_that_add_up(llm: LLM) -> None:
    whole = llm.generate(STORIES[:2], greedy(), use_tqdm=False)
    texts = ["", ""]
    for delta in llm.stream(STORIES[:2], greedy()):
        texts[int(delta.request_id)] += delta.outputs[0].text
    assert texts == [output.outputs[0].text for output in whole]


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(STORIES, greedy(100))
    next(stream)
    assert llm.usage().used > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.usage().used == 0
    assert not llm.engine.has_unfinished


def test_chat_follows_the_template_and_hits_the_prefix_of_the_last_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What colour is a lemon?"}]
    first = llm.chat(messages, greedy(40), use_tqdm=False)[0]
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "Where does a fish live?"},
    ]
    second = llm.chat(messages, greedy(40), use_tqdm=False)[0]
    assert first.outputs[0].finish_reason == second.outputs[0].finish_reason == "stop"
    assert second.num_cached_tokens >= (len(first.prompt_token_ids) - 1) // 16 * 16


def test_a_conversation_can_be_continued_without_the_assistants_mark(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    marked, bare = llm.render_chat(messages), llm.render_chat(messages, add_generation_prompt=False)
    assert marked[: len(bare)] == bare
    assert len(marked) > len(bare)
    output = llm.chat(messages, greedy(4), use_tqdm=False, add_generation_prompt=False)[0]
    assert output.prompt_token_ids == bare


def test_the_progress_bar_counts_samples_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", screen)
    llm.generate(STORIES[:2], greedy(4, n=2))
    assert "4/4" in screen.getvalue()


def test_stop_strings_cut_inside_tokens(llm: LLM) -> None:
    text = llm.generate(STORIES[0], greedy(40), use_tqdm=False)[0].outputs[0].text
    stop = text[10:15]
    output = llm.generate(STORIES[0], greedy(40, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.index(stop)], "stop", stop)
    shown = llm.generate(STORIES[0], greedy(40, stop=stop, include_stop_str_in_output=True), use_tqdm=False)[0].outputs[
        0
    ]
    assert shown.text == text[: text.index(stop) + len(stop)]


def test_stop_token_ids_and_min_tokens(llm: LLM) -> None:
    ids = llm.generate(STORIES[0], greedy(20), use_tqdm=False)[0].outputs[0].token_ids
    stop = ids[5]
    cut = llm.generate(STORIES[0], greedy(20, stop_token_ids=(stop,)), use_tqdm=False)[0].outputs[0]
    assert cut.token_ids == ids[: ids.index(stop) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    held = llm.generate(STORIES[0], greedy(20, stop_token_ids=(stop,), min_tokens=12), use_tqdm=False)[0].outputs[0]
    assert stop not in held.token_ids[:12]
    assert len(held.token_ids) > 12


def test_logprobs_name_the_chosen_token_first(llm: LLM) -> None:
    output = llm.generate(STORIES[0], greedy(6, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1
        assert len(position) == 3
    total = sum(
        position[token_id].logprob for token_id, position in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_are_the_same_cold_warm_chunked_and_preempted(llm: LLM) -> None:
    prompt = STORIES[0] * 8

    def measure(engine: LLM, times: int = 1) -> list[list[float]]:
        outputs = engine.generate([prompt] * times, greedy(30, prompt_logprobs=0, ignore_eos=True), use_tqdm=False)
        results = []
        for output in outputs:
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert output.num_cached_tokens == 0
            rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            results.append([position[token_id].logprob for token_id, position in rest if position is not None])
        return results

    expected = measure(llm)[0]
    assert len(expected) == len(llm.generate(prompt, greedy(1), use_tqdm=False)[0].prompt_token_ids) - 1
    close = [pytest.approx(expected, abs=0.05)]
    assert measure(llm) == close
    assert measure(load(max_num_seqs=4, max_num_batched_tokens=7)) == close
    scarce = load(num_kv_blocks=16, max_model_len=176, max_num_batched_tokens=256, enable_prefix_caching=False)
    assert measure(scarce, 3) == close * 3
    assert scarce.stats.num_preemptions > 0


def test_seeds_and_the_engines_seed(llm: LLM) -> None:
    def texts(engine: LLM, **params: Any) -> list[str]:
        outputs = engine.generate(STORIES[:2], SamplingParams(max_tokens=20, **params), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    assert texts(llm, seed=3) == texts(llm, seed=3) == texts(load(seed=9), seed=3)
    assert texts(llm, seed=3) != texts(llm, seed=4)
    assert texts(load(seed=1)) == texts(load(seed=1)) != texts(load(seed=2))


def test_an_engine_without_a_tokenizer_takes_and_gives_token_ids(bare: LLM) -> None:
    output = bare.generate([[5, 6, 7]], greedy(4, ignore_eos=True), use_tqdm=False)[0]
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(UnsupportedFeature, match="prompt_token_ids"):
        bare.generate("text", greedy())
    with pytest.raises(UnsupportedFeature, match="stop_token_ids"):
        bare.generate([[5]], greedy(stop="x"))
    with pytest.raises(UnsupportedFeature, match="messages"):
        bare.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, None),
        ([], {}, InvalidParameter),
        ([1, -1], {}, InvalidParameter),
        ([1, 10**9], {}, InvalidParameter),
        ([1, True], {}, InvalidParameter),
        ([1, "a"], {}, InvalidParameter),
        ([1, 2.0], {}, InvalidParameter),
        ({"prompt": "a", "prompt_token_ids": [1]}, {}, InvalidParameter),
        ({"prompt": [1]}, {}, InvalidParameter),
        ({"text": "a"}, {}, InvalidParameter),
        (b"bytes", {}, InvalidParameter),
        (None, {}, InvalidParameter),
        ("\ud800", {}, InvalidParameter),
        ([1] * 512, {}, PromptTooLong),
        ([1], {"logit_bias": {10**6: 1.0}}, InvalidParameter),
        ([1], {"allowed_token_ids": [10**6]}, InvalidParameter),
        ([1], {"n": 65}, InvalidParameter),
        ([1], {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, InvalidParameter),
    ],
)
def test_a_bad_request_is_refused_and_leaves_the_others_alone(
    llm: LLM, prompt: Any, params: dict[str, Any], error: type[Exception] | None
) -> None:
    llm.engine.add_request("good", STORIES[0], greedy())
    engine = llm.engine
    if error is None:
        # The tokenizer puts its beginning-of-text token, so an empty text is a prompt.
        engine.add_request("bad", prompt, SamplingParams(max_tokens=1, **params))
    elif params.get("n"):
        with pytest.raises(error, match="max_num_seqs"):
            SamplingParams(**params).check_for_model(vocab_size=10, max_num_seqs=64)
    else:
        with pytest.raises(error):
            engine.add_request("bad", prompt, SamplingParams(max_tokens=1, **params))
    good = [output for output in iter_outputs(llm) if output == "good"]
    assert good


def iter_outputs(llm: LLM) -> Iterator[str]:
    """Step to the end, naming the requests that finish."""
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            if output.finished:
                yield output.request_id


def test_one_bad_prompt_among_many_runs_nothing(llm: LLM) -> None:
    before = llm.stats.num_steps
    prompts: list[Prompt] = [STORIES[0], [-1]]
    with pytest.raises(InvalidParameter):
        llm.generate(prompts, greedy())
    assert llm.stats.num_steps == before


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, n=2, max_tokens=40, stop_token_ids=tuple(range(200, 264)), ignore_eos=True),
        SamplingParams(seed=2, max_tokens=40, stop=("the",), min_tokens=3, ignore_eos=True),
        SamplingParams(seed=3, n=2, max_tokens=40, logprobs=1, include_stop_str_in_output=True),
    ],
)
def test_an_output_that_is_only_final_is_all_deltas_together(llm: LLM, params: SamplingParams) -> None:
    """Wherever the request is aborted: its samples are read when they end, and their texts then."""
    num_ended = 0
    for num_steps in (0, 1, 2, 9, 60):
        for name in ("deltas", "final"):
            llm.engine.add_request(name, STORIES[0], params, RequestOptions(final_only=name == "final"))
        outputs = [output for _ in range(num_steps) for output in llm.engine.step()]
        num_ended += sum(output.finished for output in outputs)
        aborted = [llm.engine.abort_request(name) for name in ("deltas", "final")]
        outputs += [output for output in aborted if output is not None]
        (final,) = [output for output in outputs if output.request_id == "final"]
        first, *others = [output for output in outputs if output.request_id == "deltas"]
        for delta in others:
            first.add(delta)
        for output in (first, final):
            assert output.metrics.finished_s is not None
            assert (output.metrics.first_token_s is None) is (num_steps == 0)
            output.metrics, output.request_id = RequestMetrics(), ""
        assert final == replace(
            first,
            num_cached_tokens=final.num_cached_tokens,
            cache_hit_end=final.cache_hit_end,
            cache_differs_at=final.cache_differs_at,
            prompt_account=final.prompt_account,
        )
    assert num_ended > 1


def test_parameters_and_priorities_at_the_engines_door(llm: LLM) -> None:
    wrong: tuple[Any, ...] = ([greedy()], {"temperature": 0}, 5, [greedy(), None, greedy(), greedy()])
    for params in wrong:
        with pytest.raises(InvalidParameter, match="sampling_params"):
            llm.generate(STORIES, params)
    wrong = (("priority", 1.5), ("priority", True), *((field, value) for field in NAMES for value in ("", 7)))
    for field, value in wrong:
        with pytest.raises(InvalidParameter, match=field):
            llm.engine.add_request("x", STORIES[0], greedy(), RequestOptions(**{field: value}))
    llm.engine.add_request("twice", STORIES[0], greedy())
    with pytest.raises(InvalidParameter, match="request_id"):
        llm.engine.add_request("twice", STORIES[0], greedy())
    assert llm.engine.abort_request("twice") is not None
    assert llm.engine.abort_request("twice") is None


@pytest.mark.parametrize("field", NAMES)
def test_what_has_another_name_is_kept_apart(llm: LLM, field: str) -> None:
    prompt = STORIES[1] * 6
    llm.reset_prefix_cache()

    def cached(name: str | None) -> int:
        options: dict[str, Any] = {field: name}
        llm.engine.add_request("named", prompt, greedy(1), RequestOptions(**options))
        (output,) = [output for output in llm.engine.step() if output.finished]
        return output.num_cached_tokens

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached(None) < 16, "other stories begin alike"
    assert min(cached("a"), cached("b"), cached(None)) > 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 10**6}, "at most"),
        ({"num_kv_blocks": 3}, "num_kv_blocks to at least 32, or max_model_len to at most 48"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 20_000}, "kv_cache_memory_bytes to at least 1081344 bytes"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 10**15}, "available"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"no_such_option": 1}, "known options"),
        ({"max_num_batched_tokens": 5}, "max_num_seqs"),
        ({"model": "/no/such/folder"}, "does not exist"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**options)


class Failing:
    """A data plane that fails in the steps it is told to, and otherwise obeys."""

    def __init__(self, inner: Executor, ticks: set[int]) -> None:
        self.inner, self.ticks = inner, ticks

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if plan.tick in self.ticks:
            return LaunchedStep.failed(WorkerError("no power"))
        return self.inner.launch(plan)

    def measure_copies(self) -> float | None:
        return self.inner.measure_copies()

    def move(self, ops: MemoryOps) -> None:
        self.inner.move(ops)

    def close(self) -> None:
        self.inner.close()


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    llm = load()
    llm.engine.executor = Failing(llm.engine.executor, {1})
    first = llm.generate(STORIES[0], greedy(), use_tqdm=False)[0]
    assert first.outputs[0].finish_reason == "error"
    assert "no power" in str(first.error)
    assert llm.usage().used == 0
    again = llm.generate(STORIES[0], greedy(), use_tqdm=False)[0]
    assert again.outputs[0].text == load().generate(STORIES[0], greedy(), use_tqdm=False)[0].outputs[0].text


def test_failures_in_a_row_are_the_engines_end() -> None:
    llm = load()
    llm.engine.executor = Failing(llm.engine.executor, set(range(100)))
    assert llm.generate(STORIES[0], greedy(), use_tqdm=False)[0].error
    assert llm.generate(STORIES[0], greedy(), use_tqdm=False)[0].error
    with pytest.raises(WorkerError, match="in a row"):
        llm.generate(STORIES[0], greedy(), use_tqdm=False)
