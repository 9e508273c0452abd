"""Greedy tokens equal those of transformers with a draft model beside the target, under every history."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory import SlidingWindow, check
from quire.models.checkpoints.checkpoint import locate
from tests.conformance.checkpoints import NEW_TOKENS, save_checkpoint
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import load, outputs_of


@pytest.fixture(scope="module")
def reference(core_reference: Reference) -> Reference:
    """Return a family's reference."""
    return core_reference


@pytest.fixture(scope="module")
def noisy(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reference's checkpoint with weights a little off: it often guesses right, and often wrong."""
    return noisy_copy(reference.folder, tmp_path_factory.mktemp("noisy"))


def noisy_copy(model: Path, folder: Path, share: float = 0.15) -> Path:
    """Write a checkpoint with weights a little off those of another one: noise is this share of them."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * share
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def with_model(reference: Reference, draft: Path, **options: Any) -> LLM:
    """Load a reference with a draft model; a block is taken for each of the two."""
    options.setdefault("num_kv_blocks", 200)
    # How often drafts are right is to change nothing of how many there are.
    llm = load(reference, speculative_method="draft", draft_model=str(draft), num_speculative_tokens=4, **options)
    llm.engine.step_recorder.speculation = None
    speculation: Any = llm.engine.scheduler.drafter
    speculation.step_costs = [1.0] * 5
    return llm


def test_right_guesses_are_all_accepted(reference: Reference) -> None:
    llm = with_model(reference, reference.folder)
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    stats = llm.stats
    # Some outputs end by a token of their own, and drafts go past it.
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens


def test_some_guesses_are_wrong(reference: Reference, noisy: Path) -> None:
    llm = with_model(reference, noisy)
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
    chunked = with_model(reference, noisy, max_num_seqs=3, max_num_batched_tokens=7, async_scheduling=True)
    assert chunked.engine.scheduler.plans_ahead
    assert outputs_of(chunked, reference.prompts) == reference.outputs


def test_what_is_hit_was_computed_by_both(reference: Reference) -> None:
    """A prompt from the cache is guessed on as well as a new one."""
    llm = with_model(reference, reference.folder)
    prompt = max(reference.prompts, key=len)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    for output in (first, again):
        assert output.outputs[0].num_accepted_tokens == output.outputs[0].num_draft_tokens > 5


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"swap_space": 8 << 20, "preemption_mode": "swap"}],
    ids=["recomputed", "swapped"],
)
def test_preempted(reference: Reference, noisy: Path, options: dict[str, Any]) -> None:
    llm = with_model(reference, noisy, num_kv_blocks=12, max_model_len=96, watermark=0.0, **options)
    assert outputs_of(llm, reference.prompts * 2) == reference.outputs * 2
    # Windows need so little that two models' may fit.
    has_windows = any(isinstance(group.spec, SlidingWindow) for group in llm.engine.scheduler.memory.groups)
    assert llm.stats.num_preemptions > 0 or has_windows
    assert llm.stats.num_draft_tokens > 0
    # What was computed again was so in both models: the target itself as a draft model is never wrong.
    same = with_model(reference, reference.folder, num_kv_blocks=12, max_model_len=96, watermark=0.0, **options)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    same.generate(reference.prompts * 2, params, use_tqdm=False)
    assert same.stats.num_accepted_tokens == same.stats.num_draft_tokens > 0


def test_forked_and_sampled(reference: Reference, noisy: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=NEW_TOKENS, n=3, repetition_penalty=1.2)

    def samples(llm: LLM) -> list[list[list[int]]]:
        outputs = llm.generate(reference.prompts, params, use_tqdm=False)
        check(llm.engine.scheduler.memory)
        return [[sample.token_ids for sample in output.outputs] for output in outputs]

    llm = with_model(reference, noisy)
    assert samples(llm) == samples(load(reference))
    assert llm.stats.num_draft_tokens > 0


def test_a_model_of_another_kind_may_guess(tmp_path: Path) -> None:
    """Windows for all, and a state for a layer that has attention in the target: groups of their own."""
    target = save_checkpoint("qwen3", tmp_path / "target")
    expected = None
    for family in (None, "gemma3", "lfm2", "granite4"):
        options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "block_size": 8}
        if family is not None:
            draft = save_checkpoint(family, tmp_path / family)
            options |= {"speculative_method": "draft", "draft_model": str(draft), "num_speculative_tokens": 3}
        llm = LLM(str(target), **options, max_model_len=64, kv_cache_memory_bytes=8 << 20)
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        outputs = [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [8] * 9], params, use_tqdm=False)]
        expected = expected or outputs
        assert outputs == expected, family
        assert family is None or llm.stats.num_draft_tokens > 0


# ---- what cannot guess ----


def refused(target: Path, draft: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        LLM(str(target), speculative_method="draft", draft_model=draft, num_kv_blocks=64, **options)
    return caught.value


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = save_checkpoint("qwen3", tmp_path / "target")
    error = refused(target, "bundled", skip_tokenizer_init=True, max_model_len=64)
    assert error.field == "draft_model"
    assert "bundled" in str(error)
    assert str(target) in str(error)
    assert "2048 tokens" in str(error)


def test_other_tokens_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(locate("bundled"), folder)
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    error = refused(folder, "bundled", max_model_len=64)
    assert error.field == "draft_model"
    assert f"token {min(vocab['a'], vocab['b'])} is another one" in str(error)


def test_shorter_contexts_and_missing_models_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(locate("bundled"), folder)
    config = (folder / "config.json").read_text(encoding="utf-8")
    assert '"max_position_embeddings": 1024' in config
    (folder / "config.json").write_text(config.replace('embeddings": 1024', 'embeddings": 100'), encoding="utf-8")
    error = refused(locate("bundled"), str(folder))
    assert error.field == "draft_model"
    assert "contexts of 100 tokens, and max_model_len is 1024: set max_model_len to at most 100" in str(error)
    assert "nowhere" in str(refused(locate("bundled"), str(tmp_path / "nowhere")))
