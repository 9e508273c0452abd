"""Heads of classes over decoders: `LlamaForSequenceClassification` and its like for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from quire.models.families.base_models import causal_name
from quire.models.families.encoder_layout import read_labels, read_scores
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import renamed_sources
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.spec import ModelSpec, WeightMap

Head = tuple[ClassifierHead, WeightMap]
# The token `<extra_0>` of Qwen 2.5, which ends a step; no field of its checkpoints states it.
STEP_TOKEN: Final = 151651
# Module of the head in most checkpoints.
SCORE: Final = "score"


def _classifier(config: HFConfig, width: int) -> Head:  # noqa: ARG001
    """One layer over the last token."""
    labels = read_labels(config)
    head = ClassifierHead(labels, "last", read_scores(config, len(labels)), bias=False)
    return head, {"classifier.output.weight": ("score.weight",)}


def _token_classifier(config: HFConfig, width: int) -> Head:
    """One layer over each token."""
    head, names = _classifier(config, width)
    has_bias = config.flag("token_classification_bias", True)
    names |= {"classifier.output.bias": ("score.bias",)} if has_bias else {}
    return replace(head, pooling="tokens", bias=has_bias), names


def _reward(config: HFConfig, width: int) -> Head:  # noqa: ARG001
    """Two layers over the last token give one number, whatever `num_labels` says: Qwen2.5-Math-RM."""
    head = ClassifierHead(("LABEL_0",), "last", "none", Dense(width, bias=True, activation="relu"))
    names: WeightMap = {}
    for ours, theirs in (("dense", "score.0"), ("output", "score.2")):
        names |= {f"classifier.{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
    return head, names


def _process_reward(config: HFConfig, width: int) -> Head:
    """Two layers over the token at the end of each step give two classes, wrong and right: Qwen2.5-Math-PRM."""
    head, names = _reward(config, width)
    labels, step_token = ("LABEL_0", "LABEL_1"), config.count("step_tag_id", STEP_TOKEN)
    return replace(head, labels=labels, pooling="tokens", scores="softmax", step_token=step_token), names


# Ending of an architecture's name in place of "ForCausalLM" -> reader of its head for a width of hidden states.
HEADS: Final[Mapping[str, Callable[[HFConfig, int], Head]]] = {
    "ForProcessRewardModel": _process_reward,
    "ForRewardModel": _reward,
    "ForSequenceClassification": _classifier,
    "ForTokenClassification": _token_classifier,
}
# Architecture -> module of its head, where that is not `score`.
HEAD_MODULES: Final = {"GPT2ForTokenClassification": "classifier"}


def _renamed(module: str, source: str) -> str:
    return source.replace(SCORE, module, 1)


def generating_name(name: str, config: Mapping[str, object]) -> str:
    """Return the architecture with an output head for one that classifies or has no head; others unchanged."""
    for ending in HEADS:
        if name.endswith(ending):
            base = name.removesuffix(ending)
            return f"{base}ForConditionalGeneration" if "text_config" in config else causal_name(f"{base}Model")
    return causal_name(name)


def with_score_head(name: str, config: HFConfig, spec: ModelSpec, names: WeightMap) -> tuple[ModelSpec, WeightMap]:
    """Return a decoder with the head of its architecture's name in place of the output head; others unchanged."""
    for ending, read in HEADS.items():
        if name.endswith(ending):
            head, head_names = read(config, spec.width)
            head_names = renamed_sources(head_names, partial(_renamed, HEAD_MODULES.get(name, SCORE)))
            # The embedding stands for the output head, which is never computed.
            others = {ours: theirs for ours, theirs in names.items() if ours != "head.weight"}
            return replace(spec, tied_head=True, mtp=None, classifier=head), others | head_names
    return spec, names
