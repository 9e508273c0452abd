"""Encoders through the Python interface: limits, refusals, prompts of the checkpoint, and commands of the CLI."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, PoolingParams
from quire.cli.main import main
from quire.errors import (
    CheckpointError,
    ConfigError,
    InvalidParameter,
    PromptTooLong,
    UnsupportedFeature,
    UnsupportedModel,
)
from tests.models import encoders

TEXT = "a red kite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose embeddings are means, with two prompts."""
    folder = tmp_path_factory.mktemp("bert")
    encoders.save(folder, "bert")
    encoders.state_pooling(folder, "pooling_mode_mean_tokens", prompts={"query": "the ", "passage": ""})
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm
        assert llm.usage().used == 0


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to damage."""
    for file in folder.rglob("*"):
        if file.is_file():
            (tmp_path / file.relative_to(folder)).parent.mkdir(exist_ok=True)
            (tmp_path / file.relative_to(folder)).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "num_threads": 1, **options})


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_prompt_may_fill_the_context_and_no_more(llm: LLM) -> None:
    (output,) = llm.embed([5] * 64, use_tqdm=False)
    assert len(output.prompt_token_ids) == 64
    with pytest.raises(PromptTooLong, match=r"65 tokens.*64"):
        llm.embed([5] * 65, use_tqdm=False)
    (cut,) = llm.embed("kite " * 100, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert [cut.prompt_token_ids[0], len(cut.prompt_token_ids), cut.prompt_token_ids[-1]] == [1, 64, 2]
    with pytest.raises(InvalidParameter, match="truncate_prompt_tokens must be -1, or at most 64"):
        llm.embed(TEXT, PoolingParams(truncate_prompt_tokens=65), use_tqdm=False)


def test_texts_are_not_generated(llm: LLM) -> None:
    with pytest.raises(UnsupportedFeature, match="has no output head: this engine makes embeddings only"):
        llm.generate(TEXT, use_tqdm=False)
    with pytest.raises(UnsupportedFeature, match="no head that classifies"):
        llm.classify(TEXT, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="at least one token long"):
        llm.embed([[]], use_tqdm=False)
    assert llm.embed([], use_tqdm=False) == []


def test_limits_of_a_step_and_of_the_checkpoint(copied: Path) -> None:
    with load(copied, max_num_batched_tokens=20, max_num_seqs=4) as llm:
        assert llm.resolved.max_model_len == 20
        outputs = llm.embed([[5] * count for count in (20, 11, 9, 1)], use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in outputs] == [20, 11, 9, 1]
        assert llm.engine.num_steps == 3
        with pytest.raises(PromptTooLong):
            llm.embed([5] * 21, use_tqdm=False)
    with pytest.raises(ConfigError, match="set max_model_len to at most 20"):
        load(copied, max_num_batched_tokens=20, max_num_seqs=4, max_model_len=30)
    (copied / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    with load(copied) as llm, pytest.raises(PromptTooLong):
        llm.embed([5] * 13, use_tqdm=False)
    (copied / "sentence_bert_config.json").write_text('{"max_seq_length": "12"}')
    with pytest.raises(CheckpointError, match="max_seq_length must be an integer from 1"):
        load(copied)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 5},
        {"kv_cache_memory_bytes": "1GiB"},
        {"kv_cache_dtype": "int8"},
        {"swap_space": "1GiB"},
        {"prefix_cache_dir": "/tmp/never-made"},
        {"speculative_method": "ngram"},
        {"classifier_from_token": "a,b"},
        {"deterministic": True},
    ],
    ids=str,
)
def test_options_of_a_kv_cache_are_refused(folder: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=.* is for models that generate") as caught:
        load(folder, **options)
    assert caught.value.field == name


def test_prompts_of_the_checkpoint(llm: LLM, copied: Path) -> None:
    plain, with_text = (llm.embed(text, use_tqdm=False)[0] for text in (TEXT, "the " + TEXT))
    (named,) = llm.embed(TEXT, prompt_name="query", use_tqdm=False)
    assert named.prompt_token_ids == with_text.prompt_token_ids
    assert named.outputs == with_text.outputs
    assert llm.embed(TEXT, prompt_name="passage", use_tqdm=False)[0].outputs == plain.outputs
    with pytest.raises(InvalidParameter, match="prompt_name must be one of 'query', 'passage', got 'other'"):
        llm.embed(TEXT, prompt_name="other", use_tqdm=False)
    change(copied / "config_sentence_transformers.json", default_prompt_name="query")
    with load(copied) as other:
        assert other.embed(TEXT, use_tqdm=False)[0].prompt_token_ids == named.prompt_token_ids
        (given,) = other.embed(plain.prompt_token_ids, use_tqdm=False)
        assert given.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({"query": "the ", "document": "a ", "passage": "sea "}, "passage", "the ", "a "),
        ({"passage": "sea ", "corpus": "a "}, None, "", "sea "),
        # A prompt for one role only, which may be the default too, is not for the other.
        ({"query": "the "}, "query", "the ", ""),
        ({"sts": "the ", "sort": "a "}, "sts", "the ", "the "),
        ({"sts": "the ", "sort": "a "}, None, "", ""),
    ],
)
def test_scores_have_prompts_of_queries_and_documents(
    copied: Path, prompts: dict[str, str], default: str | None, query: str, document: str
) -> None:
    encoders.state_pooling(copied, "pooling_mode_mean_tokens", prompts=prompts, default_prompt_name=default)
    name = next(iter(prompts))
    with load(copied) as llm:
        found = llm.score(TEXT, ["the sea", "kites"], use_tqdm=False)
        (named,) = llm.score(TEXT, "kites", query_prompt_name=name, document_prompt_name=name, use_tqdm=False)
    encoders.state_pooling(copied, "pooling_mode_mean_tokens")
    with load(copied) as llm:
        wanted = llm.score(query + TEXT, [document + "the sea", document + "kites"], use_tqdm=False)
        (plain,) = llm.score(prompts[name] + TEXT, prompts[name] + "kites", use_tqdm=False)
    assert [each.outputs.score for each in found] == [each.outputs.score for each in wanted]
    assert [each.prompt_token_ids for each in found] == [each.prompt_token_ids for each in wanted]
    assert named.outputs == plain.outputs


def test_a_cross_encoder_has_a_prompt_for_the_query(tmp_path: Path) -> None:
    encoders.save(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    encoders.state_prompts(tmp_path, prompts={"query": "the ", "rank": "a "}, default_prompt_name="rank")
    with load(tmp_path) as llm:
        (found,) = llm.score(TEXT, "the sea", use_tqdm=False)
        (named,) = llm.score(TEXT, "the sea", query_prompt_name="query", use_tqdm=False)
    encoders.state_prompts(tmp_path)
    with load(tmp_path) as llm:
        for output, prompt in ((found, "a "), (named, "the ")):
            assert llm.score(prompt + TEXT, "the sea", use_tqdm=False)[0].outputs == output.outputs


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_the_stated_similarity(copied: Path, name: str) -> None:
    encoders.state_pooling(copied, "pooling_mode_mean_tokens", normalize=False, similarity_fn_name=name)
    with load(copied) as llm:
        first, second = (each.outputs.embedding for each in llm.embed([TEXT, "the sea"], use_tqdm=False))
        (score,) = llm.score(TEXT, "the sea", use_tqdm=False)
    pairs = list(zip(first, second, strict=True))
    dot = sum(x * y for x, y in pairs)
    wanted = {
        "cosine": dot / math.hypot(*first) / math.hypot(*second),
        "dot": dot,
        "euclidean": -math.dist(first, second),
        "manhattan": -sum(abs(x - y) for x, y in pairs),
    }
    assert score.outputs.score == pytest.approx(wanted[name], rel=1e-4)


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, r"pooling 'mean_tokens\+max_tokens'"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_poolings_that_are_not_implemented(copied: Path, file: str, fields: dict[str, Any], words: str) -> None:
    path = copied / file
    path.write_text(path.read_text() if path.is_file() else "{}")
    change(path, **fields)
    with load(copied) as llm, pytest.raises(UnsupportedFeature, match=words):
        llm.embed(TEXT, use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_residual": True}, "2_Dense/config.json has use_residual True"),
        ({"activation_function": "torch.nn.Mish"}, "2_Dense/config.json has activation_function 'Mish'"),
        ({"module_input_name": "token_embeddings"}, "2_Dense/config.json has module_input_name 'token_embeddings'"),
        (None, "2_Dense/model.safetensors is missing"),
    ],
)
def test_dense_layers_that_are_not_implemented(copied: Path, fields: dict[str, Any] | None, words: str) -> None:
    encoders.add_dense(copied, (torch.eye(32), None, "linear.Identity"))
    if fields is None:
        (copied / "2_Dense" / "model.safetensors").unlink()
    else:
        change(copied / "2_Dense" / "config.json", **fields)
    with load(copied) as llm, pytest.raises(UnsupportedFeature, match=words):
        llm.embed(TEXT, use_tqdm=False)


def test_damaged_dense_layers_are_refused(copied: Path) -> None:
    encoders.add_dense(copied, (torch.eye(32), None, "linear.Identity"))
    for fields in ({"out_features": 10**9}, {"out_features": 31}, {"out_features": "a"}, {"bias": True}):
        change(copied / "2_Dense" / "config.json", **{"out_features": 32, "bias": False, **fields})
        with pytest.raises(CheckpointError, match=r"out_features|dense\.0"):
            load(copied)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": ["a"]}, "prompts must be an object of strings"),
        ({"default_prompt_name": "other"}, "default_prompt_name must be one of the prompts, got 'other'"),
        ({"similarity_fn_name": "hamming"}, "similarity_fn_name must be one of"),
    ],
)
def test_damaged_prompts_are_named(copied: Path, fields: dict[str, Any], words: str) -> None:
    change(copied / "config_sentence_transformers.json", **fields)
    with pytest.raises(CheckpointError, match=words):
        load(copied)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 30}, r"hidden_size \(30\) must be an even multiple of num_attention_heads"),
        ({"max_position_embeddings": 10**6}, "max_position_embeddings is 1,000,000, but the largest"),
        ({"type_vocab_size": 3}, "token_types.weight"),
        ({"num_hidden_layers": 5}, "layers.4|layer.4"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
    ],
)
def test_damaged_configurations_are_refused(copied: Path, fields: dict[str, Any], words: str) -> None:
    change(copied / "config.json", **fields)
    with pytest.raises((CheckpointError, UnsupportedModel), match=words):
        load(copied)


@pytest.mark.parametrize("family", ["modernbert", "nomic", "embedding-gemma"])
def test_absurd_lengths_are_refused(tmp_path: Path, family: str) -> None:
    """Rotated positions need no table, so no tensor limits them."""
    encoders.save(tmp_path, family)
    change(tmp_path / "config.json", max_position_embeddings=10**9)
    with pytest.raises(CheckpointError, match="max_position_embeddings must be at most 1,048,576"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name the classes 0, 1, ..."),
        ({"id2label": {"0": "a", "1": 5}}, "id2label.1 must be a string"),
        ({"sbert_ce_default_activation_function": "torch.nn.Softplus"}, "only Sigmoid and Identity"),
        ({"id2label": {str(idx): "a" for idx in range(9)}}, "classifier.output"),
    ],
)
def test_damaged_heads_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    encoders.save(tmp_path, "bert", "ForSequenceClassification", num_labels=2)
    change(tmp_path / "config.json", **fields)
    with pytest.raises((CheckpointError, UnsupportedModel), match=words):
        load(tmp_path)


def test_a_head_of_classes(tmp_path: Path) -> None:
    encoders.save(tmp_path, "bert", "ForSequenceClassification", num_labels=2)
    with load(tmp_path) as llm:
        (output,) = llm.classify(TEXT, use_tqdm=False)
        assert output.outputs.num_classes == 2
        assert sum(output.outputs.probs) == pytest.approx(1.0)
        with pytest.raises(UnsupportedFeature, match="has 2 classes; a score needs one"):
            llm.score(TEXT, TEXT, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="classifies texts, and makes no embeddings"):
            llm.embed(TEXT, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="use_activation must be true, false or None, got 5"):
            llm.classify(TEXT, use_activation=5, use_tqdm=False)  # type: ignore[arg-type]
    change(tmp_path / "config.json", problem_type="multi_label_classification")
    with load(tmp_path) as llm:
        (each,) = llm.classify(TEXT, use_tqdm=False)
    logits = [math.log(p / (1 - p)) for p in each.outputs.probs]
    assert output.outputs.probs[0] == pytest.approx(1 / (1 + math.exp(logits[1] - logits[0])), rel=1e-3)


def test_pairs_that_are_too_long_are_refused(tmp_path: Path) -> None:
    encoders.save(tmp_path, "roberta", "ForSequenceClassification", num_labels=1)
    with load(tmp_path) as llm:
        with pytest.raises(PromptTooLong):
            llm.score(TEXT, "kite " * 70, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="more than the 4 special tokens of a pair"):
            llm.score(TEXT, TEXT, truncate_prompt_tokens=4, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="texts of at most 65536 characters in a pair"):
            llm.score(TEXT, "k" * 70_000, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="Unicode text"):
            llm.score(TEXT, "\ud800", use_tqdm=False)
        assert llm.score(TEXT, TEXT, truncate_prompt_tokens=5, use_tqdm=False)


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    assert "BertModel" in capsys.readouterr().out
    refused = "BertModel is an encoder, which generates no text and has no KV cache"
    only = "the checkpoint has no output head: this engine makes embeddings only"
    for command, words in ((["plan", str(folder)], refused), (["generate", str(folder), "--prompt", "a"], only)):
        assert main(command) != 0
        assert words in " ".join(capsys.readouterr().err.split())
