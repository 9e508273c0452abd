"""Embeddings through the Python interface: what a checkpoint states, truncation, refusals and failures."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from quire import LLM, PoolingParams, SamplingParams
from quire.engine.outputs.pooled_outputs import embedding_of
from quire.engine.scoring import SIMILARITIES
from quire.errors import (
    CheckpointError,
    ConfigError,
    InvalidParameter,
    PromptTooLong,
    UnsupportedFeature,
    WorkerError,
)
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.checkpoints.pooling_config import read_pooling
from quire.models.specs.spec import ModelSpec, RMSNorm
from quire.sequences.pooling import NO_SAMPLING, Pooling
from tests.conformance.checkpoints import FAMILIES
from tests.engine.test_llm import load

TEXT = "Once upon a time, a small fox found a red kite."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = load()
    yield llm
    assert llm.usage().used == 0
    llm.close()


def copy_bundled(folder: Path, modules: list[str], **pooling: Any) -> Path:
    """Copy the bundled model, with the files of sentence-transformers."""
    shutil.copytree(locate("bundled"), folder)
    names = [{"idx": idx, "path": f"{idx}_{name}", "type": f"models.{name}"} for idx, name in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(names))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def length(values: list[float]) -> float:
    return math.hypot(*values)


def test_a_prefix_of_a_generation_serves_an_embedding(llm: LLM) -> None:
    llm.generate(TEXT, use_tqdm=False)
    first, second = llm.embed([TEXT, TEXT + " The end"], use_tqdm=False)
    assert first.num_cached_tokens == len(first.prompt_token_ids) - 1 > 0
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 1
    assert length(first.outputs.embedding) == pytest.approx(1.0)
    assert first.outputs.embedding != second.outputs.embedding


def test_a_longer_prompt_is_cut_where_that_is_asked_for(llm: LLM) -> None:
    (whole,) = llm.embed(TEXT, use_tqdm=False)
    ids = whole.prompt_token_ids
    for prompt in (TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}):
        (cut,) = llm.embed([prompt], PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
        assert cut.prompt_token_ids == ids[:5]
    (cut,) = llm.embed(TEXT, PoolingParams(truncate_prompt_tokens=500), use_tqdm=False)
    assert cut.prompt_token_ids == ids
    (cut,) = llm.embed(TEXT * 200, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut.prompt_token_ids) == 511
    with pytest.raises(PromptTooLong):
        llm.embed(TEXT * 200, use_tqdm=False)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dimensions", 0, "dimensions must be an integer from 1"),
        ("dimensions", True, "dimensions must be an integer"),
        ("dimensions", 10_000, r"dimensions must be at most the width of the model \(\d+\), got 10000"),
        ("normalize", 1, "normalize must be true, false or None, got 1"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be -1, or an integer from 1"),
        ("truncate_prompt_tokens", 512, "truncate_prompt_tokens must be -1, or at most 511, got 512"),
    ],
)
def test_bad_parameters_are_refused(llm: LLM, field: str, value: object, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        llm.embed(TEXT, PoolingParams(**{field: value}), use_tqdm=False)  # type: ignore[arg-type]


def test_other_parameters_and_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="pooling_params must be PoolingParams"):
        llm.embed(TEXT, 5, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="prompts must be"):
        llm.embed(5, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="prompt must be"):
        llm.embed([5.5], PoolingParams(truncate_prompt_tokens=3), use_tqdm=False)  # type: ignore[arg-type]


def test_the_checkpoint_states_whether_embeddings_are_normalised(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "m", ["Transformer", "Pooling"], pooling_mode_lasttoken=True, include_prompt=True)
    with load(model=str(folder)) as llm:
        (raw,) = llm.embed(TEXT, use_tqdm=False)
        (unit,) = llm.embed(TEXT, PoolingParams(normalize=True), use_tqdm=False)
    size = length(raw.outputs.embedding)
    assert abs(size - 1.0) > 1e-3
    assert [value / size for value in raw.outputs.embedding] == pytest.approx(unit.outputs.embedding, abs=1e-6)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (["Transformer", "Pooling"], {"pooling_mode": ["max", "mean"]}, r"states the pooling 'max\+mean'"),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "states the pooling 'cls'"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "lasttoken"}, "2_Dense/config.json, which is mis"),
        (["Transformer", "Pooling", "LayerNorm"], {"pooling_mode": "max"}, "modules.json has a module 'LayerNorm'"),
        (["Transformer", "Normalize", "Pooling"], {"pooling_mode": "max"}, "modules in an order that is not implement"),
    ],
)
def test_other_poolings_are_refused_and_texts_are_not(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], words: str
) -> None:
    with load(model=str(copy_bundled(tmp_path / "m", modules, **pooling))) as llm:
        assert llm.generate(TEXT, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(UnsupportedFeature, match=words):
            llm.embed(TEXT, use_tqdm=False)


def test_damaged_files_of_the_pooling_are_named(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "m", ["Transformer", "Pooling"])
    file = folder / "1_Pooling" / "config.json"
    for content, words in (("[1]", "must hold a JSON dict"), ("{", "cannot be read as JSON")):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=words):
            load(model=str(folder))
    file.unlink()
    with (
        load(model=str(folder)) as llm,
        pytest.raises(UnsupportedFeature, match=r"1_Pooling/config\.json, which is mis"),
    ):
        llm.embed(TEXT, use_tqdm=False)
    (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../x"}]')
    with pytest.raises(CheckpointError, match=r"must name a folder for each module, got '\.\./x'"):
        load(model=str(folder))


def test_a_result_that_is_not_finite_ends_its_request_alone(tmp_path: Path) -> None:
    name, fields = FAMILIES["qwen2"]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**fields))
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = float("nan")
    model.save_pretrained(tmp_path)
    with load(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64) as llm:
        with pytest.raises(WorkerError, match="not of finite numbers"):
            llm.embed([[5, 11], [5, 6]], use_tqdm=False)
        (output,) = llm.embed([5, 6], use_tqdm=False)
        assert length(output.outputs.embedding) == pytest.approx(1.0)


@pytest.mark.parametrize("embedding", [(6.0, 5.0, 7.0, -1.0), (-8.0, -7.0, 8.0, 3.0)])
def test_a_cosine_is_at_most_one(embedding: tuple[float, ...]) -> None:
    """The product of these with themselves, as unit vectors, rounds to more."""
    assert SIMILARITIES["cosine"](embedding, embedding) == 1.0
    assert SIMILARITIES["cosine"](embedding, [-each for each in embedding]) == -1.0


def test_scores_are_cosines_of_embeddings(llm: LLM) -> None:
    texts = ["a red kite", "a kite", "The sailor slept."]
    query, *documents = (output.outputs.embedding for output in llm.embed(texts, use_tqdm=False))
    scores = llm.score(texts[0], texts[1:], use_tqdm=False)
    wanted = [sum(map(mul, query, document)) for document in documents]
    assert [score.outputs.score for score in scores] == pytest.approx(wanted, abs=1e-5)
    pairs = llm.score(texts, texts, use_tqdm=False)
    assert [pair.outputs.score for pair in pairs] == pytest.approx([1.0] * 3, abs=1e-5)
    for queries, documents_, words in (
        (texts[:2], texts, "queries must be one text, or as many as documents has, got '2 texts'"),
        (texts[0], [], "documents must be a string or a list of strings, at least one"),
        (5, texts, "queries must be a string or a list of strings, at least one, got 5"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            llm.score(queries, documents_, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="instruction must be a string"):
        llm.score("a", "b", instruction=5, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="use_activation must be true, false or None, got 'no'"):
        llm.score("a", "b", use_activation="no", use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="an embedding model has none"):
        llm.score("a", "b", instruction="c", use_tqdm=False)


def test_a_reranker_scores_by_two_tokens() -> None:
    """The score equals the softmax over two of transformers' logits after the prompt of Qwen3-Reranker."""
    model = transformers.AutoModelForCausalLM.from_pretrained(locate("bundled"), dtype=torch.float32).eval()
    with load(classifier_from_token="a,e", dtype="float32", max_model_len=1024) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "e")]
        outputs = llm.score("a kite", ["a red kite", "a sailor"], instruction="Find toys", use_tqdm=False)
        for output, document in zip(outputs, ("a red kite", "a sailor"), strict=True):
            text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            assert text.endswith(
                f"<Instruct>: Find toys\n<Query>: a kite\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
                "<think>\n\n</think>\n\n"
            )
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1, ids]
            assert output.outputs.score == pytest.approx(logits.softmax(0)[1].item(), abs=1e-5)
        again = llm.score("a kite", "a sailor", instruction="Find toys", use_tqdm=False)
        assert again[0].num_cached_tokens == len(again[0].prompt_token_ids) - 1
        assert again[0].outputs.score == pytest.approx(outputs[1].outputs.score, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classifier_from_token": "yes"}, "must be two texts with a comma between, got 'yes'"),
        ({"classifier_from_token": "a,kites and sailors"}, "must name two tokens of the model"),
        ({"classifier_from_token": "a,a"}, "must name two tokens of the model"),
        ({"classifier_from_token": "a,e", "skip_tokenizer_init": True}, "needs a tokenizer"),
    ],
)
def test_bad_classifiers_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**options)


@pytest.mark.parametrize(("name", "is_tied"), [("qwen3", False), ("llama3", True)])
def test_a_checkpoint_without_a_head_makes_embeddings(tmp_path: Path, name: str, is_tied: bool) -> None:
    """Embedding models are saved so; their tensors are named without a prefix."""
    family, fields = FAMILIES[name]
    model = transformers.AutoModel.from_config(getattr(transformers, f"{family}Config")(**fields)).eval()
    model.save_pretrained(tmp_path)
    with load(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64) as llm:
        (output,) = llm.embed([5, 9, 11, 30], use_tqdm=False)
        with torch.inference_mode():
            state = model(torch.tensor([[5, 9, 11, 30]])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), state / state.norm(), rtol=2e-4, atol=2e-4)
        if is_tied:
            assert llm.generate([5, 9], use_tqdm=False)[0].outputs[0].token_ids
        else:
            with pytest.raises(UnsupportedFeature, match="has no output head: this engine makes embeddings only"):
                llm.generate([5, 9], use_tqdm=False)
    if not is_tied:
        with pytest.raises(ConfigError, match="needs an output head"):
            load(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64, classifier_from_token="a,e")


def test_deterministic_embeddings_are_the_same_in_any_batch_and_with_any_hit() -> None:
    texts = [TEXT, TEXT[:20], "The sailor slept."]
    with load(deterministic=True) as llm:
        batched, hit = (llm.embed(texts, use_tqdm=False) for _ in range(2))
        alone = [llm.embed(text, use_tqdm=False)[0] for text in texts]
    assert all(output.num_cached_tokens for output in hit)
    for outputs in (hit, alone):
        assert [output.outputs.embedding for output in outputs] == [output.outputs.embedding for output in batched]


def test_embeddings_beside_drafts_and_beams() -> None:
    """Rows of drafts and beams of the same step stay with their requests."""
    text = "Tom had a kite. Tom had a kite. Tom had"
    with load(speculative_method="ngram", dtype="float32") as llm:
        expected = [output.outputs.embedding for output in llm.embed([TEXT, text], use_tqdm=False)]
        engine = llm.engine
        pooled: dict[str, tuple[float, ...]] = {}
        engine.add_request("drafts", text, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        engine.add_request("beams", TEXT, SamplingParams(beam_width=3, max_tokens=30, ignore_eos=True))
        for step in range(60):
            if step in range(3, 24, 3):
                prepared = engine.requests.prepare_pooled([TEXT, text][step % 2], Pooling())
                engine.add_request(str(step), prepared, NO_SAMPLING)
            pooled |= {output.request_id: output.pooled for output in engine.step() if output.pooled}
        assert not engine.has_unfinished
        assert engine.stats.num_drafts > 0
    assert len(pooled) == 7
    for name, values in pooled.items():
        assert embedding_of(values, None, normalize=True) == pytest.approx(expected[int(name) % 2], abs=1e-5)


def test_a_text_ends_with_the_tokenizers_end_token_cut_or_not(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "m", ["Transformer", "Pooling", "Normalize"], pooling_mode_lasttoken=True)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [library.id_to_token(token_id) for token_id in (3, 2)]
    pairs = list(zip(names, (3, 2), strict=True))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{names[0]} $A {names[1]}", special_tokens=pairs
    )
    library.save(str(folder / "tokenizer.json"))
    with load(model=str(folder)) as llm:
        plain = library.encode(TEXT, add_special_tokens=False).ids
        for limit in (None, 7, 3):
            (output,) = llm.embed(TEXT, PoolingParams(truncate_prompt_tokens=limit), use_tqdm=False)
            assert output.prompt_token_ids == [3, *plain[: None if limit is None else limit - 2], 2]
        with pytest.raises(InvalidParameter, match="truncate_prompt_tokens must be more than the 2 special tokens"):
            llm.embed(TEXT, PoolingParams(truncate_prompt_tokens=2), use_tqdm=False)


@pytest.mark.parametrize(
    ("stated", "kind", "refusal"),
    [
        (None, "last", None),
        (3, "last", None),
        (1, "mean", None),
        (2, "last", "cls"),
        (4, "last", "rank"),
        (9, "last", "9"),
        ([1], "last", "[1]"),
    ],
)
def test_a_gguf_file_states_its_pooling(tmp_path: Path, stated: object, kind: str, refusal: str | None) -> None:
    fields = {} if stated is None else {"qwen3.pooling_type": stated}
    spec = ModelSpec(8, 8, (), RMSNorm(1e-6), tied_head=True, max_position=8)
    found = read_pooling(Checkpoint(tmp_path, {}, {}, {}, gguf_fields=fields), spec)
    assert found.kind == kind
    assert (found.refusal is None) if refusal is None else (repr(refusal) in str(found.refusal))
