"""Drafts of a model's own head for multi-token prediction: they are those of a slow twin, and change no output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory import check
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.sequences.decoding.drafting import ModelDrafter
from quire.sequences.sequence import Sequence
from quire.sequences.structured import StructuredOutputs
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    NEW_TOKENS,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import load, outputs_of
from tests.models.gguf.writer import f32, write_gguf
from tests.models.mtp import SlowHead, save_mtp_checkpoint

SWAP = {"swap_space": 8 << 20, "preemption_mode": "swap"}
SCARCE = {"num_kv_blocks": 24, "block_size": 4, "max_model_len": 96, "watermark": 0.0}
Drafts = Callable[[tuple[int, ...], int], tuple[int, ...]]


class RecordingDrafter(ModelDrafter):
    """Wants up to four drafts in each step, and records them.

    Attributes:
        seen: tokens of a sequence before a step, the drafts that the step verified, and the number of accepted ones.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        return tuple(super().propose(sequence, min(limit, 4)))

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        known = tuple(sequence.tokens[: sequence.num_computed + 1])
        self.seen.append((known, tuple(sequence.draft), num_accepted))
        assert len(sequence.draft) == num_drafted


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """See `noisy_model`."""
    return noisy_model(tmp_path_factory)


def noisy_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a model whose head often guesses right, and often wrong."""
    folder = save_mtp_checkpoint(tmp_path_factory.mktemp("noisy"), noise=0.07, head_noise=0.5)
    prompts = ragged_prompts()
    return Reference(folder, prompts, generate_with_transformers(folder, prompts, [EOS_TOKEN_ID]), 4)


@pytest.fixture(scope="module")
def drafts(noisy: Reference) -> Drafts:
    """Return the slow twin of its head."""
    return cache(SlowHead(noisy.folder).drafts)


def with_head(reference: Reference, **options: Any) -> tuple[LLM, RecordingDrafter]:
    """Load a model with drafts of its head, whose number does not depend on how often they are right."""
    llm = load(reference, speculative_method="mtp", **options)
    drafter = RecordingDrafter()
    llm.engine.scheduler.drafts.drafter = drafter
    return llm, drafter


def assert_those_of(drafts: Drafts, drafter: RecordingDrafter) -> None:
    """See that each draft is what the twin guesses from the whole sequence, and that some were right, some wrong."""
    assert [draft for _, draft, _ in drafter.seen] == [drafts(known, len(draft)) for known, draft, _ in drafter.seen]
    assert {0, 2} <= {num_accepted for _, _, num_accepted in drafter.seen}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        SCARCE | SWAP,
        SCARCE | SWAP | {"async_scheduling": True},
        pytest.param(SCARCE, marks=pytest.mark.slow),
        pytest.param(SCARCE | {"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"block_size": 3, "num_kv_blocks": 500}, marks=pytest.mark.slow),
        pytest.param({"state_snapshot_interval": 8}, marks=pytest.mark.slow),
    ],
    ids=[
        "cold_and_hit",
        "chunked",
        "swapped",
        "async",
        "recomputed",
        "uncached",
        "blocks_of_3",
        "snapshots",
    ],
)
def test_each_draft_is_the_heads(noisy: Reference, drafts: Drafts, options: dict[str, Any]) -> None:
    """Also behind prefix hits, rejected drafts and preemptions: none of them leaves out a hidden state."""
    llm, drafter = with_head(noisy, **options)
    assert outputs_of(llm, noisy.prompts) == noisy.outputs
    assert outputs_of(llm, noisy.prompts * 2) == noisy.outputs * 2
    assert_those_of(drafts, drafter)
    # In scarce memory nothing published stays for long.
    assert (llm.stats.num_preemptions if "watermark" in options else llm.stats.prefix_hits) > 0


def test_a_head_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    folder = save_mtp_checkpoint(tmp_path, noise=0.0, head_noise=0.0)
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, num_kv_blocks=400, speculative_method="mtp")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.outputs[0].num_accepted_tokens == output.outputs[0].num_draft_tokens > 20
    assert llm.stats.num_accepted_tokens == llm.stats.num_draft_tokens
    assert (llm.resolved.speculative_method, llm.resolved.num_speculative_tokens) == ("mtp", 8)


def test_samples_and_log_probabilities_are_those_without_drafts(noisy: Reference) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=NEW_TOKENS, n=3, repetition_penalty=1.2, logprobs=2)
    llm, drafter = with_head(noisy)
    found, expected = (each.generate(noisy.prompts, params, use_tqdm=False) for each in (llm, load(noisy)))
    check(llm.engine.scheduler.memory)
    for output, other in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs]
        for one, two in zip(output.outputs, other.outputs, strict=True):
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, rel=1e-4)
    assert sum(num_accepted for _, _, num_accepted in drafter.seen) > 20


def test_beams_get_no_drafts(noisy: Reference) -> None:
    params = SamplingParams(beam_width=3, max_tokens=8)
    llm, drafter = with_head(noisy)
    found, expected = (each.generate(noisy.prompts[:3], params, use_tqdm=False) for each in (llm, load(noisy)))
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert not drafter.seen


@pytest.mark.slow
def test_structured_outputs_are_those_without_drafts(tmp_path: Path) -> None:
    save_mtp_checkpoint(tmp_path, noise=0.07, head_noise=0.5, vocab_size=2048, eos_token_id=1, bos_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(locate("bundled") / name, tmp_path)
    forms = (
        StructuredOutputs(regex="[a-z ]{40,60}"),
        StructuredOutputs(choice=("yes", "no")),
        StructuredOutputs(json={"type": "array"}),
    )
    each = [
        SamplingParams(temperature=0.7, seed=3, max_tokens=60, n=2, structured_outputs=form, logprobs=logprobs)
        for form in forms
        for logprobs in (None, 1)
    ]
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_kv_blocks": 800}
    found = []
    for more in ({}, {"speculative_method": "mtp", "num_speculative_tokens": 4}):
        llm = LLM(str(tmp_path), **options, **more)
        outputs = llm.generate(["Once upon a time"] * len(each), each, use_tqdm=False)
        found.append([[sample.token_ids for sample in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert llm.stats.num_draft_tokens > 0


def test_the_head_reads_embeddings_of_media(noisy: Reference) -> None:
    media = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    prompt = {"prompt_token_ids": noisy.prompts[4], "media": [{"offset": 0, "embeddings": media}]}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm, drafter = with_head(noisy, max_num_seqs=3, max_num_batched_tokens=25)
    found, again, expected = (
        each.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for each in (llm, llm, load(noisy))
    )
    assert found == again == expected
    assert_those_of(SlowHead(noisy.folder, media).drafts, drafter)


def test_a_head_in_a_gguf_file(noisy: Reference, drafts: Drafts, tmp_path: Path) -> None:
    """The file has it as a block behind the last layer, which is no layer of the model."""
    path = write_gguf(noisy.folder, tmp_path / "model.gguf", f32)
    checkpoint = Checkpoint.open(str(path))
    assert checkpoint.gguf_fields is not None
    num_layers = checkpoint.config["text_config"]["num_hidden_layers"]
    assert (checkpoint.gguf_fields["qwen35.block_count"], num_layers) == (5, 4)
    # Without a tokenizer, the file names no end token.
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop_token_ids=(EOS_TOKEN_ID,))
    llm, drafter = with_head(noisy._replace(folder=path))
    assert outputs_of(llm, noisy.prompts, params) == noisy.outputs
    assert_those_of(drafts, drafter)
    assert outputs_of(load(noisy._replace(folder=path)), noisy.prompts, params) == noisy.outputs


# ---- what has no head ----


def test_a_model_without_a_head_is_refused_by_the_name_of_the_option(noisy: Reference, tmp_path: Path) -> None:
    without = save_checkpoint("qwen3.5", tmp_path / "without")
    left_out = tmp_path / "left_out"  # the field stays in the configuration
    shutil.copytree(without, left_out)
    shutil.copy(noisy.folder / "config.json", left_out)
    several, own = tmp_path / "several", tmp_path / "own"
    for folder, changes in ((several, {"mtp_num_hidden_layers": 2}), (own, {"mtp_use_dedicated_embeddings": True})):
        shutil.copytree(noisy.folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    for folder in (without, left_out, several, own, save_checkpoint("qwen3", tmp_path / "attention")):
        with pytest.raises(ConfigError, match="'ngram', 'suffix', 'draft' or 'off'") as caught:
            LLM(str(folder), skip_tokenizer_init=True, speculative_method="mtp", num_kv_blocks=64)
        assert caught.value.field == "speculative_method"
        assert str(folder) in str(caught.value)
