"""A whole engine on Triton's kernels, interpreted or on a GPU: its greedy tokens are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory import check
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    POOL_FACTORS,
    VOCAB_SIZE,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)
from tests.conformance.conftest import REPRESENTATIVES, make_reference
from tests.ops.triton.device import DEVICE, IS_INTERPRETED, MARKS

from quire.ops.triton import step_states  # isort: skip - the module above skips where Triton is missing
from quire.ops.triton.delta_chunks import correct_in_chunks  # isort: skip
from quire.ops.triton.state_chunks import StateChunks  # isort: skip

SLOW = pytest.mark.slow
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def load(folder: str, pool_factor: int = 1, kernels: str = "triton", **options: Any) -> LLM:
    """Load a model on the device of the tests; steps are captured, or launched ahead, only where options say so."""
    defaults: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "block_size": 8,
        "num_kv_blocks": 60 * pool_factor,
        # On a GPU both are what an engine does by itself.
        "enforce_eager": "cudagraph_capture_sizes" not in options,
        "async_scheduling": False,
    }
    return LLM(folder, skip_tokenizer_init=True, kernels=kernels, num_threads=1, **(defaults | options))


class TestEngine:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", sorted(REPRESENTATIVES))
    def test_greedy_tokens(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Prompts together, in chunks, and again from the cache."""
        reference = make_reference(name, tmp_path_factory)
        llm = load(str(reference.folder), reference.pool_factor, max_num_batched_tokens=32)
        assert llm.engine.config.kernels == ("triton (interpreted)" if IS_INTERPRETED else "triton")
        prompts = reference.prompts[:3]
        for _ in range(2):
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            for tokens, expected in zip(found, reference.outputs, strict=False):
                # What the reference ends by itself is compared as far as it goes.
                assert list(tokens[: len(expected)]) == list(expected[:NUM_TOKENS])
        check(llm.engine.scheduler.memory)

    @pytest.mark.parametrize("name", ["falcon-h1", "granite4", "qwen3.5"])
    def test_prompts_in_chunks(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A prompt of several chunks over three steps, beside decodes and another one; then again from its snapshot."""
        folder = save_checkpoint(name, tmp_path)
        rng = random.Random(3)
        prompts = [[rng.randrange(10, VOCAB_SIZE) for _ in range(count)] for count in (5, 210, 70)]
        expected = generate_with_transformers(folder, prompts, [EOS_TOKEN_ID])
        num_chunks = []

        def seen(carry: Callable[..., None]) -> Callable[..., None]:
            def carry_seen(chunks: StateChunks, *args: Any) -> None:
                num_chunks.append(len(chunks.starts))
                carry(chunks, *args)

            return carry_seen

        monkeypatch.setattr(StateChunks, "scan", seen(StateChunks.scan))
        monkeypatch.setattr(step_states, "correct_in_chunks", seen(correct_in_chunks))
        llm = load(str(folder), 2 * POOL_FACTORS[name], max_model_len=256, max_num_batched_tokens=100,
                   state_snapshot_interval=128)  # fmt: skip
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            for output, tokens in zip(found, expected, strict=True):
                known = tokens[:NUM_TOKENS]
                assert list(output.outputs[0].token_ids)[: len(known)] == known
        assert max(num_chunks) > 1
        check(llm.engine.scheduler.memory)

    @pytest.mark.parametrize("stored", ["int8", "fp8"])
    def test_stored_cache(self, stored: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The tokens are those of stock operators on the same kind of cache."""
        folder = str(save_checkpoint("llama3", tmp_path_factory.mktemp("llama3")))
        outputs = []
        for kernels in ("torch", "triton"):
            llm = load(folder, kernels=kernels, kv_cache_dtype=stored)
            found = llm.generate(ragged_prompts()[:2], GREEDY, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
        assert outputs[0] == outputs[1]

    def test_a_tied_head_is_held_once(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        llm = load(str(save_checkpoint("llama3", tmp_path_factory.mktemp("tied"))))
        decoder = llm.engine.executor._runner._decoder  # type: ignore[attr-defined]
        assert decoder.spec.tied_head
        head, look_up = decoder._embedding._head.run, decoder._embedding.look_up
        assert look_up.__self__ is head
        ids = torch.tensor([5, 0, 5], device=DEVICE)
        assert torch.equal(look_up(ids), head.weight[ids])


@SLOW
@pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set")
def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(ConfigError, match="for NVIDIA GPUs, and the device is 'cpu'") as caught:
        load("bundled", device="cpu")
    assert caught.value.field == "kernels"
