"""The layout of BERT and RoBERTa, and fields that the configurations of all encoders share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import map_modules
from quire.models.specs.encoder_spec import (
    BidirectionalAttention,
    EncoderLayer,
    EncoderMLP,
    EncoderSpec,
)
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.spec import WeightMap

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise

# Name of an activation -> Quire's name.
ACTIVATIONS: Final[Mapping[str, Elementwise]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
EMBEDDINGS: Final = {
    "embedding.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "token_types.weight": "token_type_embeddings.weight",
    "embedding_norm.weight": "LayerNorm.weight",
    "embedding_norm.bias": "LayerNorm.bias",
}
# A layer's modules, each with a bias: Quire's name -> modules of the checkpoint.
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": ("attention.output.dense",),
    "mixer_norm": ("attention.output.LayerNorm",),
    "ffn.up": ("intermediate.dense",),
    "ffn.down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}


def read_bert_layout(
    config: HFConfig,
    prefix: str,
    first_position: int = 0,
    layers: str = "encoder.layer",
    modules: Mapping[str, tuple[str, ...]] = MODULES,
) -> tuple[EncoderSpec, WeightMap]:
    """Read an encoder with learned positions and norms after each residual.

    Args:
        config: configuration with the names of BERT's fields.
        prefix: prefix of its tensors.
        first_position: row of a text's first token in the embedding of positions.
        layers, modules: names of the layers, and of their modules.
    """
    config.require("position_embedding_type", None, "absolute")
    config.require("is_decoder", None, False)
    num_positions = config.integer("max_position_embeddings", 512)
    if num_positions <= first_position:
        raise CheckpointError(
            f"config.json: max_position_embeddings must be more than {first_position}, got {num_positions}",
            field="max_position_embeddings",
        )
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12))
    attention = read_heads(config, bias=True)
    mlp = EncoderMLP(config.integer("intermediate_size"), read_elementwise(config, "hidden_act", "gelu"))
    spec = EncoderSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=(EncoderLayer(attention, mlp, norm, norm, norm_first=False),) * config.integer("num_hidden_layers"),
        embedding_norm=norm,
        norm=None,
        max_position=num_positions - first_position,
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=config.count("type_vocab_size", 2),
    )
    names: WeightMap = {ours: (f"{prefix}embeddings.{theirs}",) for ours, theirs in EMBEDDINGS.items()}
    for idx in range(len(spec.layers)):
        names |= map_modules(f"layers.{idx}", f"{prefix}{layers}.{idx}", modules, has_bias=True)
    return spec, names


def with_classifier(
    config: HFConfig, spec: EncoderSpec, names: WeightMap, activation: Elementwise, dense: str, output: str
) -> tuple[EncoderSpec, WeightMap]:
    """Add a head over the first token: a dense layer with an activation, and an output layer, both with biases.

    Args:
        config: configuration of the checkpoint, which names the classes.
        spec, names: the encoder.
        activation: activation after the dense layer.
        dense, output: modules of the checkpoint.
    """
    labels = read_labels(config)
    layer = Dense(spec.width, bias=True, activation=activation)
    head = ClassifierHead(labels, "cls", read_scores(config, len(labels)), layer)
    for ours, theirs in (("dense", dense), ("output", output)):
        names |= {f"classifier.{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
    return replace(spec, classifier=head), names


def with_token_classifier(config: HFConfig, spec: EncoderSpec, names: WeightMap) -> tuple[EncoderSpec, WeightMap]:
    """Add a head over each token: an output layer with biases."""
    labels = read_labels(config)
    head = ClassifierHead(labels, "tokens", read_scores(config, len(labels)))
    names |= {f"classifier.output.{kind}": (f"classifier.{kind}",) for kind in ("weight", "bias")}
    return replace(spec, classifier=head), names


def read_heads(config: HFConfig, *, bias: bool) -> BidirectionalAttention:
    """Read the attention, whose heads divide the width."""
    width, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim, remainder = divmod(width, num_heads)
    if remainder or head_dim % 2:
        raise CheckpointError(
            f"config.json: hidden_size ({width}) must be an even multiple of num_attention_heads ({num_heads})",
            field="num_attention_heads",
        )
    return BidirectionalAttention(num_heads, num_heads, head_dim, bias, bias)


def read_elementwise(config: HFConfig, name: str, default: str) -> Elementwise:
    """Read the name of an activation."""
    value = config.text(name, default)
    if value not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise UnsupportedModel(f"config.json: {name} is {shown(value)}, but only {allowed} are implemented", field=name)
    return ACTIVATIONS[value]


def read_labels(config: HFConfig) -> tuple[str, ...]:
    """Read the names of the classes from `id2label`; without it, there are `num_labels` (default 2)."""
    part = config.part("id2label")
    if part is None:
        return tuple(f"LABEL_{idx}" for idx in range(config.integer("num_labels", 2)))
    keys = [str(idx) for idx in range(len(part.names()))]
    if not keys or set(keys) != set(part.names()):
        raise CheckpointError("config.json: id2label must name the classes 0, 1, ... without a gap", field="id2label")
    return tuple(part.text(key, "") for key in keys)


def read_scores(config: HFConfig, num_labels: int) -> Literal["sigmoid", "softmax", "none"]:
    """Read the function from logits to scores: by default the sigmoid for one class, the softmax for several."""
    section = config.part("sentence_transformers")
    field, name = "sbert_ce_default_activation_function", "activation_fn"
    stated = section.text(name, "") if section is not None and section.has(name) else config.text(field, "")
    if stated:
        kind = stated.rpartition(".")[2]
        if kind not in ("Sigmoid", "Identity"):
            raise UnsupportedModel(
                f"config.json: {field} is {shown(stated)}, but only Sigmoid and Identity are implemented", field=field
            )
        return "none" if kind == "Identity" else "sigmoid"
    problem = config.text("problem_type", "")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"
