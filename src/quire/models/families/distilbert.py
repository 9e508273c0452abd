"""DistilBERT: BERT without token types, under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.models.families.encoder_layout import read_bert_layout, with_classifier, with_token_classifier
from quire.models.families.hf_config import HFConfig
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.spec import WeightMap

# BERT's name of a size -> DistilBERT's, and its default.
SIZES: Final[Mapping[str, tuple[str, int]]] = {
    "hidden_size": ("dim", 768),
    "intermediate_size": ("hidden_dim", 3072),
    "num_attention_heads": ("n_heads", 12),
    "num_hidden_layers": ("n_layers", 6),
}
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "output": ("attention.out_lin",),
    "mixer_norm": ("sa_layer_norm",),
    "ffn.up": ("ffn.lin1",),
    "ffn.down": ("ffn.lin2",),
    "ffn_norm": ("output_layer_norm",),
}


def distilbert(config: HFConfig, prefix: str = "") -> tuple[EncoderSpec, WeightMap]:
    """Read a `DistilBertModel` whose tensors have a prefix."""
    fields = {ours: config.integer(theirs, default) for ours, (theirs, default) in SIZES.items()}
    names = {"hidden_act": config.text("activation", "gelu"), "layer_norm_eps": 1e-12, "type_vocab_size": 0}
    return read_bert_layout(config.changed({**fields, **names}), prefix, layers="transformer.layer", modules=MODULES)


def distilbert_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `DistilBertForMaskedLM` without its head."""
    return distilbert(config, "distilbert.")


def distilbert_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `DistilBertForSequenceClassification`."""
    return with_classifier(config, *distilbert(config, "distilbert."), "relu", "pre_classifier", "classifier")


def distilbert_token_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read a `DistilBertForTokenClassification`."""
    return with_token_classifier(config, *distilbert(config, "distilbert."))
