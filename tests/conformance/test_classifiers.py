"""Heads of classes over decoders equal transformers' hidden states of the last token, multiplied by the head."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import CheckpointError, UnsupportedFeature
from quire.memory import check
from tests.conformance.checkpoints import FAMILIES, ragged_prompts, save_checkpoint
from tests.conformance.conftest import slow_or_exhaustive
from tests.models import encoders

# Families of the default run: a decoder of attention alone, and one with states; windows are in the slow run.
DEFAULT = ("llama3", "qwen3.5")
NUM_LABELS = 3
WIDTH = 64
PROMPTS = ragged_prompts()
# Of a vision encoder, which is not read.
VISION = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": WIDTH, "num_heads": 2, "depth": 1}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2}


# Endings of names with two layers -> their classes; and those of heads over each token.
TWO_LAYERS = {"ForRewardModel": 1, "ForProcessRewardModel": 2}
OF_TOKENS = ("ForProcessRewardModel", "ForTokenClassification")


class Classifier(NamedTuple):
    """A checkpoint, and the logits of the classes of each of `PROMPTS`, [S, C], or of all their tokens, [T, C]."""

    folder: Path
    logits: torch.Tensor


def save(family: str, folder: Path, ending: str = "ForSequenceClassification", **fields: Any) -> Classifier:
    """Save a family's decoder with a random head in place of its output head.

    Args:
        family: name in `FAMILIES`.
        folder: folder of the checkpoint.
        ending: ending of the architecture's name; a reward model has two layers.
        fields: fields of the configuration.
    """
    save_checkpoint(family, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        decoder = model.get_decoder()
        decoder = getattr(decoder, "model", decoder)  # Llama 4's is a model with a head
        hidden = [decoder(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    states = torch.cat(hidden) if ending in OF_TOKENS else torch.stack([each[-1] for each in hidden])
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"score.weight": (NUM_LABELS, WIDTH)}
    if ending == "ForTokenClassification":
        shapes["score.bias"] = (NUM_LABELS,)
    if ending in TWO_LAYERS:
        shapes = {"score.0.weight": (WIDTH, WIDTH), "score.0.bias": (WIDTH,)}
        shapes |= {"score.2.weight": (TWO_LAYERS[ending], WIDTH), "score.2.bias": (TWO_LAYERS[ending],)}
    head = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    base = config["architectures"][0].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    config["architectures"] = [base + ending]
    config["id2label"] = {str(idx): f"class {idx}" for idx in range(NUM_LABELS)}
    (folder / "config.json").write_text(json.dumps(config | fields))
    if "score.weight" in head:
        return Classifier(folder, states @ head["score.weight"].T + head.get("score.bias", torch.zeros(1)))
    inner = torch.relu(states @ head["score.0.weight"].T + head["score.0.bias"])
    return Classifier(folder, inner @ head["score.2.weight"].T + head["score.2.bias"])


def load(folder: Path, **options: Any) -> LLM:
    given = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_model_len": 128, "block_size": 8}
    return LLM(str(folder), **given | options)


def agree(llm: LLM, logits: torch.Tensor, prompts: list[list[int]] = PROMPTS) -> None:
    """Compare the logits of classes, and their scores, with those of transformers."""
    for use_activation, wanted in ((False, logits), (None, logits.softmax(-1))):
        outputs = llm.classify(prompts, use_activation=use_activation, use_tqdm=False)
        found = torch.tensor([output.outputs.probs for output in outputs])
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in DEFAULT else slow_or_exhaustive(name, frozenset(FAMILIES)))
        for name in FAMILIES
    ],
)
def test_every_family_classifies(family: str, tmp_path: Path) -> None:
    """Alone, with hits of all that was computed before, and in chunks."""
    made = save(family, tmp_path)
    with load(made.folder) as llm:
        for prompt, logits in zip(PROMPTS, made.logits, strict=True):
            agree(llm, logits[None], [prompt])
        agree(llm, made.logits)
        with pytest.raises(UnsupportedFeature, match="has no output head"):
            llm.generate([5, 6], use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="classifies texts, and makes no embeddings"):
            llm.embed([5, 6], use_tqdm=False)
    with load(made.folder, max_num_batched_tokens=5, max_num_seqs=3) as llm:
        agree(llm, made.logits)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3Text", "Gemma3", "Qwen3_5", "Qwen3_5Text", "GPT2"])
def test_checkpoints_of_transformers(name: str, tmp_path: Path) -> None:
    """Names of tensors and fields are those that transformers saves, of a language model inside another too."""
    family = {"Qwen3": "qwen3", "Gemma3": "gemma3", "Qwen3_5": "qwen3.5", "GPT2": "gpt2"}[name.removesuffix("Text")]
    model_class = getattr(transformers, f"{name}ForSequenceClassification")
    fields = FAMILIES[family][1]
    config_class = model_class.config_class
    labels = {"num_labels": NUM_LABELS}
    if "text_config" in config_class.sub_configs:
        config = config_class(text_config=fields, vision_config=VISION, pad_token_id=0, **labels)
    else:
        config = config_class(**fields, **labels)
    torch.manual_seed(4)
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    with load(tmp_path) as llm:
        agree(llm, logits)


def test_a_reward_model_gives_its_number(tmp_path: Path) -> None:
    made = save("qwen2", tmp_path, "ForRewardModel")
    with load(tmp_path) as llm:
        found = torch.tensor([output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)])
    torch.testing.assert_close(found, made.logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("ending", OF_TOKENS)
@pytest.mark.parametrize("budget", [None, 5])
def test_heads_over_each_token(tmp_path: Path, ending: str, budget: int | None) -> None:
    """All tokens, or those that end a step; in one step and in chunks, and no prefix is reused."""
    made = save("qwen2", tmp_path, ending, step_tag_id=PROMPTS[2][5])
    options = {} if budget is None else {"max_num_batched_tokens": budget, "max_num_seqs": 3}
    with load(tmp_path, **options) as llm:
        outputs = llm.classify_tokens(PROMPTS, use_activation=False, use_tqdm=False)
        again = llm.classify_tokens(PROMPTS, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="classifies tokens, not texts: use classify_tokens"):
            llm.classify([5], use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="classifies tokens, not texts"):
            llm.score("a", "b", use_tqdm=False)
        check(llm.engine.scheduler.memory)
    is_step = ending == "ForProcessRewardModel"
    lengths = [len(prompt) for prompt in PROMPTS]
    each_logits = made.logits.tensor_split([*accumulate(lengths[:-1])])
    for output, scored, prompt, logits in zip(outputs, again, PROMPTS, each_logits, strict=True):
        positions = [idx for idx, token_id in enumerate(prompt) if not is_step or token_id == PROMPTS[2][5]]
        assert output.outputs.positions == scored.outputs.positions == positions
        for result, wanted in ((output, logits[positions]), (scored, logits[positions].softmax(-1))):
            found = torch.tensor(result.outputs.probs).view(wanted.shape)
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    assert any(output.outputs.positions for output in outputs)


def test_a_decoder_scores_pairs(tmp_path: Path) -> None:
    """A head of one class reads the tokens of both texts, as transformers' tokenizer joins them."""
    encoders.save_tokenizer(tmp_path, "bert")
    model_class: Any = transformers.LlamaForSequenceClassification
    torch.manual_seed(4)
    model = model_class(model_class.config_class(**FAMILIES["llama3"][1], num_labels=1)).eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    documents = ["the small fox slept", "a toy", "kites . a red sea"]
    with torch.inference_mode():
        ids = [torch.tensor([tokenizer("a red kite", each)["input_ids"]]) for each in documents]
        wanted = torch.cat([model(each).logits[0] for each in ids])
    with load(tmp_path, skip_tokenizer_init=False) as llm:
        for use_activation, scores in ((None, wanted.sigmoid()), (False, wanted)):
            outputs = llm.score("a red kite", documents, use_activation=use_activation, use_tqdm=False)
            found = torch.tensor([output.outputs.score for output in outputs])
            torch.testing.assert_close(found, scores, rtol=2e-4, atol=2e-4)
        with pytest.raises(UnsupportedFeature, match="classifies texts, not tokens: use classify"):
            llm.classify_tokens([5], use_tqdm=False)


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    save("llama3", tmp_path, id2label={"0": "a"})
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForRewardModel"]}))
    with pytest.raises(CheckpointError, match=r"score\.2\.weight"):
        load(tmp_path)
