"""MPNet: RoBERTa without token types, and with learned addends of scores by the distance between tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from quire.models.families.encoder_layout import read_bert_layout, with_classifier
from quire.models.families.hf_config import HFConfig
from quire.models.specs.encoder_spec import EncoderSpec, RelativePositions
from quire.models.specs.spec import WeightMap

# Both are constants of the family, which no field states.
FIRST_POSITION: Final = 2
NUM_BUCKETS, MAX_DISTANCE = 32, 128
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "output": ("attention.attn.o",),
    "mixer_norm": ("attention.LayerNorm",),
    "ffn.up": ("intermediate.dense",),
    "ffn.down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}


def mpnet(config: HFConfig, prefix: str = "") -> tuple[EncoderSpec, WeightMap]:
    """Read an `MPNetModel` whose tensors have a prefix."""
    config.require("relative_attention_num_buckets", None, NUM_BUCKETS)
    fields = config.changed({"type_vocab_size": 0})
    spec, names = read_bert_layout(fields, prefix, FIRST_POSITION, modules=MODULES)
    names |= {"relative_positions.weight": (f"{prefix}encoder.relative_attention_bias.weight",)}
    return replace(spec, relative_positions=RelativePositions(NUM_BUCKETS, MAX_DISTANCE)), names


def mpnet_of_masked_words(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read an `MPNetForMaskedLM` without its head."""
    return mpnet(config, "mpnet.")


def mpnet_classifier(config: HFConfig) -> tuple[EncoderSpec, WeightMap]:
    """Read an `MPNetForSequenceClassification`."""
    return with_classifier(config, *mpnet(config, "mpnet."), "tanh", "classifier.dense", "classifier.out_proj")
