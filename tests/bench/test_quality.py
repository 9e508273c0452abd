"""Quality beside exact values: the figures by definition, the text, and models whose losses are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.quantization.paged_rows import run_sequences
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measurement.bench.divergence import DivergenceTally, GreedyAgreement
from quire.measurement.bench.exact_ops import ExactLinear, ExactOps
from quire.measurement.bench.quality import QualityBench, ReadingEngine, exact_config
from quire.measurement.bench.quality_text import MAX_SEQUENCE, greedy_prompts, read_quality_text
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.loading.loading import load_decoder
from quire.ops.interface.quantized_weight import PlainWeight, StoredWeight
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.models.encoders import save
from tests.models.gguf.cases import save_checkpoint
from tests.ops.test_quantized_weights import FLOAT8, FORMS, random_weight

IDS = list(range(40, 110))


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_folder(locate("bundled"))
    yield tokenizer
    tokenizer.close()


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(**({"num_threads": 1} | options))


# ---- figures ----


def test_figures_are_those_of_their_definitions() -> None:
    """In pieces of any size; a token that neither model can write adds nothing, one that only ours cannot, infinity."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(50, 90, generator=generator) * 3
    found = exact + torch.randn(50, 90, generator=generator) * 0.1
    exact[:, 7] = found[:, 7] = -torch.inf
    targets = torch.randint(8, 90, (50,), generator=generator)
    p, q = exact.double().softmax(-1), found.double().softmax(-1)
    divergences = torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)
    for size in (50, 7, 1):
        tally = DivergenceTally()
        for part in (slice(first, first + size) for first in range(0, 50, size)):
            tally.add(found[part], exact[part], targets[part])
        result = tally.result()
        assert result.num_positions == 50
        assert result.kl_mean == pytest.approx(divergences.mean().item(), rel=1e-4)
        assert result.kl_median == pytest.approx(divergences.median().item(), rel=1e-4)
        assert result.kl_max == pytest.approx(divergences.max().item(), rel=1e-4)
        assert result.kl_p99 == pytest.approx(divergences.quantile(0.99).item(), rel=1e-4)
        assert result.same_best == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        for perplexity, probs in ((result.perplexity, q), (result.exact_perplexity, p)):
            logs = probs.gather(1, targets[:, None]).log()
            assert perplexity == pytest.approx((-logs.mean()).exp().item(), rel=1e-5)
    found[0, 8] = -torch.inf
    tally.add(found[:1], exact[:1], targets[:1])
    assert tally.result().kl_max == torch.inf


def test_greedy_outputs_are_compared_up_to_where_they_part() -> None:
    exact = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    agreement = GreedyAgreement.of([[1, 2, 3, 4], [5, 6, 0, 8], [0, 9, 9, 9]], exact)
    assert (agreement.num_prompts, agreement.num_tokens, agreement.num_equal) == (3, 4, 1)
    assert agreement.mean_equal_tokens == (4 + 2 + 0) / 3


# ---- text ----


def test_the_bundled_text_is_long_and_divided(tokenizer: Tokenizer) -> None:
    sequences = read_quality_text(tokenizer, None, 100, 0)
    assert sum(len(ids) - 1 for ids in sequences) >= 2000
    assert max(map(len, sequences)) == 100
    assert {ids[0] for ids in sequences} == {tokenizer.bos_token_id}
    whole = read_quality_text(tokenizer, None, MAX_SEQUENCE, 0)
    assert max(map(len, whole)) > 513  # beyond the windows of Gemma 3
    some = read_quality_text(tokenizer, None, 100, 250)
    assert some == [*sequences[:2], sequences[2][:50]]


def test_a_plain_file_is_one_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "A fox slept.\nThe sea was calm.\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in (text, "A kite.")))
    assert read_quality_text(tokenizer, tmp_path / "a.txt", 512, 0) == [tokenizer.encode(text)]
    expected = [tokenizer.encode(text), tokenizer.encode("A kite.")]
    assert read_quality_text(tokenizer, tmp_path / "a.jsonl", 512, 0) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "has no text of at least two tokens"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.jsonl", b'{"text": 1}\n', "line 1: an object with a string text"),
        ("b.txt", None, "cannot be read"),
    ],
)
def test_bad_texts_are_refused(
    name: str, content: bytes | None, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_quality_text(tokenizer, tmp_path / name, 512, 0)
    assert caught.value.field == "text"


def test_prompts_are_spread_over_a_text(tokenizer: Tokenizer) -> None:
    begin = tokenizer.bos_token_id
    assert begin is not None
    sequences = [[begin, *range(10, 60)], [begin, *range(60, 110)]]
    prompts = greedy_prompts(tokenizer, 3, sequences)
    assert prompts == [[begin, *range(start, start + 16)] for start in (10, 52, 94)]
    assert greedy_prompts(tokenizer, 1, sequences) == prompts[:1]
    assert greedy_prompts(tokenizer, 2, [[5, 6]]) == [[5, 6], [5, 6]]


def test_there_are_twenty_bundled_prompts(tokenizer: Tokenizer) -> None:
    prompts = greedy_prompts(tokenizer, 20)
    assert prompts[0] == tokenizer.encode("The quick brown fox")
    assert len({tuple(prompt) for prompt in prompts}) == 20
    with pytest.raises(ConfigError, match="at most 24 without a text, got 25"):
        greedy_prompts(tokenizer, 25)


# ---- models ----


@pytest.mark.parametrize("room", [0, 77 * 256 * 4])
@pytest.mark.parametrize("name", [*FORMS, *FLOAT8])
def test_exact_layers_multiply_dequantised_weights(name: str, room: int) -> None:
    """A row of a weight in parts, one of them plain, with columns in another order, and rows that are looked up."""
    quantised, other = random_weight((FORMS | FLOAT8)[name], 40, 256), random_weight(FORMS["q5_k"], 30, 256, seed=1)
    plain = PlainWeight(torch.randn(7, 256))
    order = torch.randperm(256)
    whole = torch.cat([quantised.dequantize(), plain.values, other.dequantize()])
    values = torch.empty_like(whole).index_copy_(1, order, whole)
    bias, x, residual = torch.randn(77), torch.randn(5, 256), torch.randn(5, 77)
    x[:, 3] *= 40.0
    linear = ExactOps(room).pack_linear(StoredWeight((quantised, plain, other), torch.float32, order), bias)
    assert isinstance(linear, ExactLinear)
    expected = x @ values.T + bias
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(x, residual), expected + residual, rtol=1e-5, atol=1e-4)
    assert torch.equal(linear.rows(torch.tensor([76, 0, 42])), values[[76, 0, 42]])
    with pytest.raises(IndexError):
        linear.rows(torch.tensor([77]))


def test_logits_are_those_of_the_decoder() -> None:
    """Positions are in order whatever the chunks of a prompt are."""
    decoder = load_decoder(Checkpoint.open("bundled"), device="cpu", dtype=torch.float32, kernels="torch")
    expected = decoder.logits(run_sequences(decoder, torch.tensor(IDS), [len(IDS)]))
    engine = ReadingEngine(config(dtype="float32", kernels="torch", max_num_batched_tokens=32, max_num_seqs=4))
    try:
        for _ in range(2):  # nothing comes from a prefix cache
            torch.testing.assert_close(engine.logits(engine.hidden(IDS)), expected, rtol=1e-4, atol=1e-4)
        assert engine.greedy([IDS], 1) == [[int(expected[-1].argmax())]]
    finally:
        engine.close()


def test_what_costs_more_is_farther_from_the_exact_values(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Tom had a red kite. One day he ran to the park with his sister. " * 8)
    found = []
    for options in (
        {"dtype": "float32", "kernels": "torch"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ):
        bench = QualityBench(config(**options), text=tmp_path / "text.txt", max_tokens=100)
        try:
            found.append((bench.divergence(), bench.greedy(3, 5)))
        finally:
            bench.close()
    exact, *others = [divergence for divergence, _ in found]
    assert (exact.num_positions, exact.kl_max, exact.same_best) == (99, 0.0, 1.0)
    assert found[0][1] == GreedyAgreement(num_prompts=3, num_tokens=5, num_equal=3, mean_equal_tokens=5.0)
    assert {each.exact_perplexity for each in others} == {exact.perplexity}
    assert 0.0 < others[0].kl_mean < others[1].kl_mean < others[2].kl_mean < 0.1
    assert others[2].same_best < 1.0


def test_a_reference_is_another_checkpoint() -> None:
    bench = QualityBench(config(quantization="int4"), reference=str(locate("bundled")), max_tokens=50)
    try:
        assert bench.divergence().kl_mean > 0
    finally:
        bench.close()
    options = exact_config(config(quantization="int4", revision="main", kv_cache_dtype="fp8"), "other")
    assert (options.model.model, options.model.revision, options.model.quantization) == ("other", None, None)
    assert (options.model.dtype, options.cache.kv_cache_dtype) == ("float32", "auto")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init"),
        ({"speculative_method": "ngram"}, "speculative_method"),
        ({"async_scheduling": True}, "async_scheduling"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        QualityBench(config(**options))
    assert caught.value.field == field


def test_other_vocabularies_and_encoders_are_refused(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "other")
    with pytest.raises(ConfigError, match="tokens in its vocabulary"):
        QualityBench(config(), reference=str(tmp_path / "other"))
    save(tmp_path / "encoder", "bert")
    with pytest.raises(ConfigError, match="an encoder"):
        QualityBench(config(model=str(tmp_path / "encoder")))
