"""What ranks do besides plain steps: adapters, drafts of models, the disk tier, whole experts; as one process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputs
from quire.errors import InvalidAdapter, LockstepDrift, WorkerError
from quire.scheduling.command_log import CommandLog
from tests.conformance.checkpoints import save_checkpoint
from tests.conformance.test_draft_model import noisy_copy
from tests.distributed.engines import llm_of_threads
from tests.engine.test_adapters import World, run
from tests.models.mtp import save_mtp_checkpoint

OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "max_model_len": 256, "num_kv_blocks": 40}
TINY: dict[str, Any] = {**OPTIONS, "skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[idx * 7 % 190 + seed for idx in range(40 + seed)] for seed in (5, 6, 8)]


def serve(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], int | None]]:
    """Return the tokens after each prompt, and how many of its tokens were cached."""
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs]


def tokens(llm: LLM) -> list[list[int]]:
    return [found for found, _ in serve(llm)]


# ---- adapters ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    ("size", "stages"),
    [(2, 1), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((2, 2), (1, 3)))],
)
def test_adapters_come_and_go_as_in_one_process(world: World, tmp_path: Path, size: int, stages: int) -> None:
    def use(llm: LLM) -> list[Any]:
        found: list[Any] = [run(llm, adapter) for adapter in (None, LoRARequest("one"), world.request("two"))]
        assert llm.engine.adapters is not None
        llm.engine.adapters.unload("one")
        in_place = LoRARequest("two", lora_path=world.paths["three"], load_inplace=True)
        found += [run(llm, in_place), run(llm, world.request("same")), run(llm, None)]
        for path in (str(tmp_path), "/nowhere"):
            with pytest.raises(InvalidAdapter):
                run(llm, LoRARequest("bad", lora_path=path))
        return [*found, *(run(llm, LoRARequest(name)) for name in ("same", "two"))]

    options = world.options("one", max_cpu_loras=3)
    with LLM(**options) as one, llm_of_threads(size=size, stages=stages, **options) as two:
        assert use(two) == use(one)


# ---- drafts ----


@pytest.mark.parametrize("kind", ["divided", "whole", "mtp"])
def test_drafts_of_models_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**TINY, "num_speculative_tokens": 3, "num_kv_blocks": 120}
    if kind == "mtp":
        model = save_mtp_checkpoint(tmp_path / "model", noise=0.07, head_noise=0.5)
        options |= {"speculative_method": "mtp", "num_kv_blocks": 400}
    else:
        model = save_checkpoint("llama3", tmp_path / "model")
        draft = tmp_path / "draft"
        if kind == "divided":
            noisy_copy(model, draft)
        else:  # three heads are not divided among two ranks
            save_checkpoint("llama3", draft, hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
        options |= {"speculative_method": "draft", "draft_model": str(draft)}

    def use(llm: LLM) -> Any:
        # How often drafts are right is to change nothing of how many there are.
        llm.engine.step_recorder.speculation = None
        speculation: Any = llm.engine.scheduler.drafter
        speculation.step_costs = [1.0] * len(speculation.step_costs)
        found = tokens(llm), tokens(llm)
        return found, llm.stats.num_draft_tokens, llm.stats.num_accepted_tokens

    with LLM(str(model), **options) as one:
        expected = use(one)
        assert expected[1] > 0
        assert kind == "whole" or 0 < expected[2] < expected[1]
    for is_async in (False, True):
        with llm_of_threads(str(model), async_scheduling=is_async, **options) as two:
            assert use(two) == expected


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])
def test_a_rank_that_draws_no_tokens_needs_no_accepted_drafts(size: int, stages: int) -> None:
    """What looks back on the tokens so far is known on rank 0 alone, which verifies drafts."""
    options = {**OPTIONS, "speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "logit_bias": {5: 50.0}, "ignore_eos": True}
    looking_back: list[dict[str, Any]] = [{"bad_words": ("fox",)}, {"presence_penalty": 0.1}, {"dry_multiplier": 0.01}]
    params = [SamplingParams(**given, **each) for each in looking_back]
    form = StructuredOutputs(regex="(ab){20}")
    params.append(SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=form))

    def use(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(["a b a b a b"] * len(params), params, use_tqdm=False)
        assert llm.stats.num_accepted_tokens > 0
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(**options) as one, llm_of_threads(size=size, stages=stages, **options) as two:
        assert use(two) == use(one)


# ---- experts ----


def test_whole_experts_give_what_one_process_gives(tmp_path: Path) -> None:
    model = str(save_checkpoint("gpt-oss", tmp_path))
    with LLM(model, **TINY) as one, llm_of_threads(model, **TINY, enable_expert_parallel=True) as two:
        assert tokens(two) == tokens(one)


# ---- the disk tier ----


def disk_options(folder: Path, *, is_async: bool = False, **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "prefix_cache_dir": str(folder), "async_scheduling": is_async, **options}


def forget(llm: LLM) -> None:
    """Evict all that is on the device and on the host."""
    serve(llm, [[number] * 150 for number in range(50, 58)])


@pytest.mark.parametrize(
    ("policy", "size", "stages", "is_async"),
    [
        ("write_back", 2, 1, False),
        pytest.param("write_through", 2, 1, False, marks=pytest.mark.slow),
        pytest.param("write_back", 2, 1, True, marks=pytest.mark.slow),
        pytest.param("write_through", 2, 1, True, marks=pytest.mark.slow),
        pytest.param("write_back", 2, 2, False, marks=pytest.mark.exhaustive),
        pytest.param("write_back", 1, 2, False, marks=pytest.mark.exhaustive),
    ],
)
def test_each_rank_keeps_its_part_over_a_restart(
    policy: str, size: int, stages: int, is_async: bool, tmp_path: Path
) -> None:
    options = disk_options(tmp_path, is_async=is_async, prefix_cache_write_policy=policy, size=size, stages=stages)
    with LLM("bundled", **OPTIONS) as one:
        expected = tokens(one)
    with llm_of_threads(**options) as two:
        assert tokens(two) == expected
    names = [f"rank-{rank}-of-{2 if stages == 1 else f'{size}x{stages}'}" for rank in range(size * stages)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with llm_of_threads(**options) as two:
        found = serve(two)
        assert [each for each, _ in found] == expected
        assert [cached for _, cached in found] == [32, 32, 32]
        two.reset_prefix_cache()
        assert [cached for _, cached in serve(two)] == [0, 0, 0]
        two.reset_prefix_cache()
    with llm_of_threads(**options) as two:
        assert [cached for _, cached in serve(two)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("size", "stages", "other", "last", "is_async"),
    [
        (2, 1, "rank-1-of-2", "rank-0-of-2", False),
        pytest.param(2, 1, "rank-1-of-2", "rank-0-of-2", True, marks=pytest.mark.slow),
        # Of four ranks, one of the first stage, and that beside rank 0.
        pytest.param(2, 2, "rank-3-of-2x2", "rank-1-of-2x2", False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_block_that_one_rank_lacks_is_a_miss_for_all(
    size: int, stages: int, other: str, last: str, is_async: bool, tmp_path: Path
) -> None:
    folder, kept = tmp_path / "cache", tmp_path / "kept"
    options = disk_options(folder, is_async=is_async, size=size, stages=stages)
    with LLM("bundled", **OPTIONS) as one:
        expected = tokens(one)
    with llm_of_threads(**options) as two:
        serve(two, [PROMPTS[0]])
    shutil.copytree(folder / other, kept)
    with llm_of_threads(**options) as two:
        assert tokens(two) == expected
    # One rank has the blocks of the first prompt only.
    shutil.rmtree(folder / other)
    shutil.copytree(kept, folder / other)
    with llm_of_threads(**options) as two:
        found = serve(two)
        assert [each for each, _ in found] == expected
        assert [cached for _, cached in found] == [32, 0, 0]
    shutil.rmtree(folder / last)
    with llm_of_threads(**options) as two:
        found = serve(two)
        assert [each for each, _ in found] == expected
        assert [cached for _, cached in found] == [0, 0, 0]


@pytest.mark.parametrize(
    ("size", "stages", "is_async"),
    [
        (2, 1, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 2, False, marks=pytest.mark.exhaustive),
        *(pytest.param(1, stages, False, marks=pytest.mark.exhaustive) for stages in (2, 3)),
    ],
)
def test_blocks_go_to_disk_and_come_back_while_requests_run(
    size: int, stages: int, is_async: bool, tmp_path: Path
) -> None:
    scarce = {"num_kv_blocks": 20, "swap_space": 1 << 19, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    options = disk_options(tmp_path, is_async=is_async, **scarce, size=size, stages=stages)
    with LLM("bundled", **{**OPTIONS, "num_kv_blocks": 20}) as one:
        expected = tokens(one)
    with llm_of_threads(**options) as two:
        assert tokens(two) == expected
        forget(two)
        loads = two.engine.scheduler.memory.archive.num_loads
        found = serve(two)
        assert [each for each, _ in found] == expected
        assert two.engine.scheduler.memory.archive.num_loads > loads


@pytest.mark.parametrize(
    ("size", "stages"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_cache_that_is_saved_with_plans_in_flight_is_right(size: int, stages: int, tmp_path: Path) -> None:
    """The engine is closed in the middle of requests, in a small pool: copies of plans in flight are made first."""
    scarce = {"num_kv_blocks": 20, "swap_space": 1 << 19, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    options = disk_options(tmp_path, is_async=stages == 1, **scarce, size=size, stages=stages)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM("bundled", **{**OPTIONS, "num_kv_blocks": 20}) as one:
        expected = tokens(one)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS * 2]
    hits = 0
    for num_outputs in (1, 9, 40, 90):
        with llm_of_threads(**options) as staged:
            stream = staged.stream(given, params)
            for _ in range(num_outputs):
                next(stream)
        with llm_of_threads(**options) as staged:
            found = serve(staged)
            assert [each for each, _ in found] == expected
            hits += sum(cached or 0 for _, cached in found)
    assert hits > 0


# ---- the end ----


def test_a_rank_that_admits_another_sequence_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(ranks: Any, message: bytes) -> None:
        seq_id, _, rest = message.partition(b",")
        ranks.group.send_commands(b"[7," + rest if message[:1] == b"[" and seq_id[1:].isdigit() else message)

    errors: list[BaseException] = []
    with llm_of_threads(errors=errors, **disk_options(tmp_path)) as two:
        monkeypatch.setattr("quire.distributed.ranks.Ranks.send_commands", other)
        with pytest.raises(WorkerError):
            serve(two)
    assert [type(error) for error in errors] == [LockstepDrift]
    assert "rank 0 admits sequence 7 next, and this rank 0" in str(errors[0])


@pytest.mark.parametrize("is_made_here", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_plan_that_some_ranks_make_ahead_is_an_error(is_made_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest says so, since there is no such plan on the other ranks: what ranks exchange does."""

    with llm_of_threads(errors=[], **OPTIONS, async_scheduling=True) as two:
        expected = tokens(two)
        scheduler = two.engine.scheduler
        assert scheduler.plans_ahead
        assert isinstance(scheduler.observer, CommandLog)
        scheduler.observer._digest_interval = 1 << 20
        if is_made_here:
            monkeypatch.setattr(scheduler.observer, "plan_ahead", lambda _: None)
        else:
            monkeypatch.setattr(scheduler._ahead, "plan", lambda *_: None)
        with pytest.raises(WorkerError, match="exchange different things"):
            assert tokens(two) == expected
