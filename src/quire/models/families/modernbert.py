"""ModernBERT: rotated heads, windows in most layers, gated MLPs, norms before each half, mostly no biases."""

from __future__ import annotations

from dataclasses import replace

from quire.models.families.encoder_layout import read_elementwise, read_heads, read_labels, read_scores
from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, read_layer_kinds, read_rope_part
from quire.models.families.llama_layout import map_modules
from quire.models.specs.encoder_spec import EncoderLayer, EncoderMLP, EncoderSpec
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.spec import WeightMap

# The kind of layers -> the older field of their theta, and its default.
THETAS = {FULL: ("global_rope_theta", 160_000.0), WINDOWED: ("local_rope_theta", 10_000.0)}


def modernbert(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `ModernBertModel`."""
    return _read(config, "")


def modernbert_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `ModernBertForMaskedLM` without its head."""
    return _read(config, "model.")


def modernbert_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `ModernBertForSequenceClassification`."""
    config.require("classifier_pooling", None, "cls", "mean")
    labels = read_labels(config)
    spec, names = _read(config, "model.")
    has_bias, norm = config.flag("classifier_bias", False), _read_norm(config)
    activation = read_elementwise(config, "classifier_activation", "gelu")
    head = ClassifierHead(
        labels,
        "mean" if config.text("classifier_pooling", "cls") == "mean" else "cls",
        read_scores(config, len(labels)),
        Dense(spec.width, has_bias, activation),
        norm,
    )
    names |= map_modules("classifier", "head", {"dense": ("dense",)}, has_bias=has_bias)
    names |= map_modules("classifier", "head", {"norm": ("norm",)}, has_bias=norm.bias)
    names |= {f"classifier.output.{kind}": (f"classifier.{kind}",) for kind in ("weight", "bias")}
    return replace(spec, classifier=head), names


def _read(config: HFConfig, prefix: str) -> tuple[EncoderSpec, WeightMap]:
    norm = _read_norm(config)
    attention = read_heads(config, bias=config.flag("attention_bias", False))
    activation = read_elementwise(config, "hidden_activation", "gelu")
    mlp = EncoderMLP(config.integer("intermediate_size"), activation, True, config.flag("mlp_bias", False))
    period = config.integer("global_attn_every_n_layers", 3)
    kinds = read_layer_kinds(config, (FULL, WINDOWED), lambda idx: WINDOWED if idx % period else FULL)
    ropes, rope_parts = config.part("rope_parameters") or HFConfig({}), {}
    for kind, (name, default) in THETAS.items():
        rope_parts[kind] = read_rope_part(config, ropes.part(kind), config.number(name, default))
    windows = {FULL: None, WINDOWED: config.integer("local_attention", 128) // 2}
    layers = tuple(
        EncoderLayer(
            replace(attention, rope=rope_parts[kind], window=windows[kind]),
            mlp,
            # The embedding is normed already.
            norm if idx else None,
            norm,
            norm_first=True,
        )
        for idx, kind in enumerate(kinds)
    )
    spec = EncoderSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=layers,
        embedding_norm=norm,
        norm=norm,
        max_position=config.integer("max_position_embeddings", 8192),
    )
    return spec, _names(spec, prefix, norm)


def _read_norm(config: HFConfig) -> LayerNorm:
    return LayerNorm(config.number("norm_eps", 1e-5), config.flag("norm_bias", False))


def _names(spec: EncoderSpec, prefix: str, norm: LayerNorm) -> WeightMap:
    names: WeightMap = {"embedding.weight": (f"{prefix}embeddings.tok_embeddings.weight",)}
    for idx, layer in enumerate(spec.layers):
        where = f"layers.{idx}", f"{prefix}layers.{idx}"
        heads, mlp = {"qkv": ("attn.Wqkv",), "output": ("attn.Wo",)}, {"ffn.up": ("mlp.Wi",), "ffn.down": ("mlp.Wo",)}
        names |= map_modules(*where, heads, has_bias=layer.attention.qkv_bias)
        names |= map_modules(*where, mlp, has_bias=layer.mlp.bias)
        norms = {"mixer_norm": ("attn_norm",)} if layer.mixer_norm is not None else {}
        names |= map_modules(*where, norms | {"ffn_norm": ("mlp_norm",)}, has_bias=norm.bias)
    ends = {"embedding_norm": f"{prefix}embeddings.norm", "norm": f"{prefix}final_norm"}
    kinds = ("weight", "bias") if norm.bias else ("weight",)
    return names | {f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in ends.items() for kind in kinds}
