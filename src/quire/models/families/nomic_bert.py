"""Nomic's BERT: rotated heads, gated MLPs and no biases, with norms after each residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.encoder_layout import read_elementwise, read_heads, with_classifier
from quire.models.families.hf_config import HFConfig, read_rope
from quire.models.families.llama_layout import map_modules
from quire.models.specs.encoder_spec import EncoderLayer, EncoderMLP, EncoderSpec
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.spec import WeightMap

# Name of a field in transformers -> its name in the published checkpoints, which GPT-2's configuration describes.
PUBLISHED: Final[Mapping[str, str]] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    # Longer texts need a rotation that changes with their length, which `rotary_scaling_factor` turns on.
    "max_position_embeddings": "max_trained_positions",
}
# Fields of the published checkpoints and their only implemented values.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_rms_norm": (None, False),
}
DEFAULTS: Final[Mapping[str, Any]] = {
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "rope_theta": 1000.0,
    "type_vocab_size": 2,
}
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("attn.Wqkv",),
    "output": ("attn.out_proj",),
    "ffn.up": ("mlp.fc12", "mlp.fc11"),
    "ffn.down": ("mlp.fc2",),
}


def nomic_bert(config: HFConfig, prefix: str = "") -> tuple[EncoderSpec, WeightMap]:
    """Read a `NomicBertModel` whose tensors have a prefix."""
    for name, allowed in NEUTRAL.items():
        config.require(name, *allowed)
    config = config.renamed(PUBLISHED).filled(DEFAULTS)
    activation = config.text("activation_function", "swiglu")
    if activation == "swiglu":
        activation = config.text("hidden_act", "silu")
    norm = LayerNorm(config.number("layer_norm_eps"))
    attention = replace(read_heads(config, bias=False), rope=read_rope(config, config.number("rope_theta")))
    mlp = EncoderMLP(
        config.integer("intermediate_size"),
        read_elementwise(config.changed({"hidden_act": activation}), "hidden_act", "silu"),
        gated=True,
        bias=False,
    )
    spec = EncoderSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=(EncoderLayer(attention, mlp, norm, norm, norm_first=False),) * config.integer("num_hidden_layers"),
        embedding_norm=norm,
        norm=None,
        max_position=config.integer("max_position_embeddings"),
        num_token_types=config.count("type_vocab_size", 2),
    )
    names: WeightMap = {
        "embedding.weight": (f"{prefix}embeddings.word_embeddings.weight",),
        "token_types.weight": (f"{prefix}embeddings.token_type_embeddings.weight",),
    }
    for kind in ("weight", "bias"):
        names[f"embedding_norm.{kind}"] = (f"{prefix}emb_ln.{kind}",)
    for idx in range(len(spec.layers)):
        where = f"layers.{idx}", f"{prefix}encoder.layers.{idx}"
        names |= map_modules(*where, MODULES)
        names |= map_modules(*where, {"mixer_norm": ("norm1",), "ffn_norm": ("norm2",)}, has_bias=True)
    return spec, names


def nomic_bert_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `NomicBertForMaskedLM` without its head."""
    return nomic_bert(config, "nomic_bert.")


def nomic_bert_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `NomicBertForSequenceClassification`."""
    encoder = nomic_bert(config, "nomic_bert.")
    return with_classifier(config, *encoder, "tanh", "nomic_bert.pooler.dense", "classifier")
