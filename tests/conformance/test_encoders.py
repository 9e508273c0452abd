"""Embeddings, scores and classes of encoders equal those of transformers, alone, batched and cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from quire import LLM, PoolingParams
from quire.errors import InvalidParameter, UnsupportedModel
from quire.memory import check
from quire.models.families.nomic_bert import PUBLISHED
from tests.models import encoders

RAW = PoolingParams(normalize=False)
LENGTHS = (5, 1, 40, 17, 64, 2, 33)
TEXTS = ["a red kite", "the small fox slept", "kites .", "the sailor flies a quick toy a the sea . a red fox"]


# Families with heads of classes.
CLASSIFIERS = ("bert", "distilbert", "modernbert", "mpnet", "nomic", "roberta")


class Made(NamedTuple):
    """A checkpoint, and transformers' model of it."""

    folder: Path
    model: Any


@pytest.fixture(scope="module", params=encoders.FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    longest: dict[str, Any] = {"max_position_embeddings": 65} if request.param == "roberta" else {}
    folder = tmp_path_factory.mktemp(request.param)
    return Made(folder, encoders.save(folder, request.param, **longest))


@pytest.fixture(scope="module", params=["bert", "embedding-gemma"])
def pooled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two of these, whose poolings are tested: which rows are pooled does not depend on the family."""
    folder = tmp_path_factory.mktemp(request.param)
    return Made(folder, encoders.save(folder, request.param))


@pytest.fixture(scope="module", params=[("modernbert", "mean"), ("bert", "cls"), ("roberta", "cls")], ids=str)
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, pooling = request.param
    folder = tmp_path_factory.mktemp(family)
    fields = {"classifier_pooling": pooling} if family == "modernbert" else {}
    return Made(folder, encoders.save(folder, family, "ForSequenceClassification", num_labels=3, **fields))


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "num_threads": 1, **options})


def token_ids(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 18, (length,), generator=generator).tolist()


def states(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return transformers' hidden states of a prompt, [T, E]."""
    with torch.inference_mode():
        hidden: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0].float()
    return hidden


def agree(llm: LLM, prompts: list[list[int]], wanted: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    outputs = llm.embed(prompts, RAW, use_tqdm=False)
    for output, prompt, each in zip(outputs, prompts, wanted, strict=True):
        assert (output.prompt_token_ids, output.num_cached_tokens) == (prompt, 0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), each, rtol=tolerance, atol=tolerance)
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0


def test_embeddings_alone_and_batched(made: Made) -> None:
    """In one step, and in steps whose budget takes some of the texts; each text is whole in one step."""
    prompts = [token_ids(length) for length in LENGTHS]
    first = [states(made.model, prompt)[0] for prompt in prompts]
    with load(made.folder, max_num_batched_tokens=512) as llm:
        agree(llm, prompts, first)
        assert llm.engine.num_steps == 1
        agree(llm, prompts[2:3], first[2:3])
    for budget, seqs in ((64, 64), (100, 2)):
        with load(made.folder, max_num_batched_tokens=budget, max_num_seqs=seqs) as llm:
            agree(llm, prompts, first)
            assert 2 < llm.engine.num_steps < len(LENGTHS)


# Poolings of hidden states [T, E], by their names in a checkpoint.
POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls_token": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
    "max_tokens": lambda hidden: hidden.max(0).values,
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "mean_tokens": lambda hidden: hidden.mean(0),
    "weightedmean_tokens": lambda hidden: weighted_mean(hidden, 0),
}


def weighted_mean(hidden: torch.Tensor, first: int) -> torch.Tensor:
    """Return the mean of rows from `first` on, each weighted by its position in the text, from 1 on."""
    weights = torch.arange(first + 1, len(hidden) + 1, dtype=torch.float64)
    return (weights @ hidden[first:].double() / weights.sum()).float()


@pytest.mark.parametrize("mode", POOLINGS)
def test_the_stated_pooling(pooled: Made, mode: str) -> None:
    prompts = [token_ids(length) for length in LENGTHS]
    encoders.state_pooling(pooled.folder, f"pooling_mode_{mode}")
    wanted = [POOLINGS[mode](states(pooled.model, prompt)) for prompt in prompts]
    with load(pooled.folder) as llm:
        agree(llm, prompts, wanted)
        (unit,) = llm.embed(prompts[0], use_tqdm=False)
        (short,) = llm.embed(prompts[0], PoolingParams(dimensions=7), use_tqdm=False)
    for output, vector in ((unit, wanted[0]), (short, wanted[0][:7])):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector / vector.norm(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [*POOLINGS])
def test_prompts_that_are_not_pooled(pooled: Made, mode: str) -> None:
    """Their tokens, and the first special token, are seen by the text and left out of the pooling."""
    encoders.state_pooling(
        pooled.folder, f"pooling_mode_{mode}", prompts={"query": "the small "}, default_prompt_name="query"
    )
    encoders.leave_prompts_out(pooled.folder)
    with load(pooled.folder) as llm:
        outputs = llm.embed(TEXTS, RAW, use_tqdm=False)
        given = llm.embed([[4, 5, 6, 2]], RAW, use_tqdm=False)[0]
        cut = llm.embed(TEXTS[0], PoolingParams(normalize=False, truncate_prompt_tokens=3), use_tqdm=False)[0]
    for output, first in (*((each, 3) for each in outputs), (given, 0), (cut, 2)):
        hidden = states(pooled.model, output.prompt_token_ids)
        pool = POOLINGS[mode]
        wanted = weighted_mean(hidden, first) if mode == "weightedmean_tokens" else pool(hidden[first:])
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=2e-5, atol=2e-5)


def test_dense_layers_after_the_pooling(pooled: Made) -> None:
    """Two, as EmbeddingGemma has them: the embedding is as wide as the last, and cut and normalised after it."""
    encoders.state_pooling(pooled.folder, "pooling_mode_mean_tokens")
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(shape, generator=generator) / 4 for shape in ((20, 32), (11, 20)))
    bias = torch.randn(11, generator=generator)
    encoders.add_dense(pooled.folder, (first, None, "linear.Identity"), (second, bias, "activation.Tanh"))
    prompts = [token_ids(length) for length in LENGTHS]
    means = torch.stack([states(pooled.model, prompt).mean(0) for prompt in prompts])
    wanted = torch.tanh(means @ first.T @ second.T + bias)
    with load(pooled.folder) as llm:
        agree(llm, prompts, [*wanted])
        agree(llm, prompts[:1], [*wanted[:1]])
        (short,) = llm.embed(prompts[0], PoolingParams(dimensions=7), use_tqdm=False)
        with pytest.raises(InvalidParameter, match=r"at most the width of the model \(11\)"):
            llm.embed(prompts[0], PoolingParams(dimensions=12), use_tqdm=False)
    cut = wanted[0, :7]
    torch.testing.assert_close(torch.tensor(short.outputs.embedding), cut / cut.norm(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["mpnet", "embedding-gemma", "nomic"])
def test_long_texts(family: str, tmp_path: Path) -> None:
    """Windows of several bands of queries, and distances beyond the last bucket."""
    model = encoders.save(tmp_path, family, max_position_embeddings=602)
    prompts = [token_ids(length) for length in (600, 3, 257, 129)]
    with load(tmp_path) as llm:
        agree(llm, prompts, [states(model, prompt)[0] for prompt in prompts], tolerance=1e-4)


def test_published_names_of_nomic(tmp_path: Path) -> None:
    """Published checkpoints have the fields of GPT-2; texts are as long as those that the model was trained on."""
    model = encoders.save(tmp_path, "nomic")
    prompts = [token_ids(length) for length in LENGTHS]
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    fields = {ours: config.pop(theirs) for theirs, ours in PUBLISHED.items() if theirs in config}
    fields |= {"rotary_emb_base": config.pop("rope_parameters")["rope_theta"], "n_positions": 8192}
    fields |= {"activation_function": "swiglu", "rotary_emb_fraction": 1.0, "qkv_proj_bias": False, "prenorm": False}
    del config["hidden_act"], config["head_dim"]
    path.write_text(json.dumps(config | fields))
    with load(tmp_path) as llm:
        agree(llm, prompts, [states(model, prompt)[0] for prompt in prompts])
        assert llm.resolved.max_model_len == 64
    path.write_text(json.dumps(config | fields | {"prenorm": True}))
    with pytest.raises(UnsupportedModel, match="prenorm is True"):
        load(tmp_path)


def test_bfloat16(made: Made) -> None:
    """The distance to transformers in float32 is about that of transformers in bfloat16."""
    prompts = [token_ids(length) for length in LENGTHS]
    exact = torch.stack([states(made.model, prompt).mean(0) for prompt in prompts])
    encoders.state_pooling(made.folder, "pooling_mode_mean_tokens")
    rounded = transformers.AutoModel.from_pretrained(made.folder, dtype=torch.bfloat16).eval()
    theirs = torch.stack([states(rounded, prompt).mean(0) for prompt in prompts])
    with load(made.folder, dtype="bfloat16") as llm:
        ours = torch.tensor([each.outputs.embedding for each in llm.embed(prompts, RAW, use_tqdm=False)])
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def test_classes_and_pairs(classifier: Made) -> None:
    """Pairs have transformers' tokens and token types; classes are the softmax of transformers' logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier.folder)
    with load(classifier.folder) as llm:
        outputs = llm.classify(TEXTS, use_tqdm=False)
        logits = llm.classify(TEXTS[0], use_activation=False, use_tqdm=False)[0].outputs.probs
        assert llm.tokenizer is not None
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[3], TEXTS[2]), (TEXTS[1], TEXTS[3])]
        found = [llm.tokenizer.encode_pair(*pair) for pair in pairs]
        cut = [llm.tokenizer.encode_pair(*pair, num_tokens=limit) for pair in pairs for limit in (6, 9, 12, 13)]
    for output, text in zip(outputs, TEXTS, strict=True):
        with torch.inference_mode():
            wanted = classifier.model(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted.softmax(0), rtol=1e-4, atol=1e-5)
        if text == TEXTS[0]:
            torch.testing.assert_close(torch.tensor(logits), wanted, rtol=1e-4, atol=1e-4)
    limits = [(pair, limit) for pair in pairs for limit in (6, 9, 12, 13)]
    for (ids, second), (pair, limit) in zip([*found, *cut], [*((each, 500) for each in pairs), *limits], strict=True):
        theirs = tokenizer(*pair, truncation=True, max_length=limit, return_token_type_ids=True)
        types = [0] * len(ids) if second is None else [0] * second + [1] * (len(ids) - second)
        assert (ids, types) == (theirs["input_ids"], theirs["token_type_ids"])


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_classes_of_tokens(family: str, tmp_path: Path) -> None:
    model = encoders.save(tmp_path, family, "ForTokenClassification", num_labels=3)
    prompts = [token_ids(length) for length in LENGTHS if length < 64]
    with load(tmp_path) as llm:
        outputs = llm.classify_tokens(prompts, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0].softmax(-1)
        assert output.outputs.positions == [*range(len(prompt))]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_cross_encoder_scores_pairs(family: str, tmp_path: Path) -> None:
    model = encoders.save(tmp_path, family, "ForSequenceClassification", num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    types = {"return_token_type_ids": family in ("bert", "nomic")}
    inputs = tokenizer([TEXTS[0]] * 3, TEXTS[1:], padding=True, return_tensors="pt", **types)
    cut = tokenizer([TEXTS[0]], [TEXTS[3]], truncation=True, max_length=9, return_tensors="pt", **types)
    with torch.inference_mode():
        logits, of_cut = model(**inputs).logits[:, 0], model(**cut).logits[:, 0]
    with load(tmp_path) as llm:
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        raw = llm.score(TEXTS[0], TEXTS[1:], use_activation=False, use_tqdm=False)
        short = llm.score(TEXTS[0], TEXTS[3], truncate_prompt_tokens=9, use_tqdm=False)
    for outputs, wanted in ((scores, logits.sigmoid()), (raw, logits), (short, of_cut.sigmoid())):
        found = torch.tensor([output.outputs.score for output in outputs])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights(made: Made, quantization: str) -> None:
    """Rounded weights change embeddings little: by their bits."""
    prompts = [token_ids(length) for length in LENGTHS]
    exact = torch.stack([states(made.model, prompt)[-1] for prompt in prompts])
    encoders.state_pooling(made.folder, "pooling_mode_lasttoken")
    with load(made.folder, quantization=quantization) as llm:
        found = torch.tensor([each.outputs.embedding for each in llm.embed(prompts, RAW, use_tqdm=False)])
    distance = ((found - exact).norm() / exact.norm()).item()
    assert 1e-5 < distance < (0.05 if quantization == "int8" else 0.5)
