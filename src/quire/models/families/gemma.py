"""Gemma, the first one, and CodeGemma: Llama with zero-centred norms and scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout, with_norm
from quire.models.specs.spec import ModelSpec, RMSNorm, WeightMap

# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GELU: Final = "gelu_pytorch_tanh"


def gemma(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GemmaForCausalLM`; for errors, see `build`.

    Source: arXiv 2403.08295.
    """
    config = config.filled(DEFAULTS)
    config.require("use_bidirectional_attention", None, False)
    # The first checkpoints state "gelu", and were trained with its approximation by tanh.
    for field in ("hidden_act", "hidden_activation"):
        config.require(field, None, "gelu", GELU)
    has_bias = config.flag("attention_bias", False)
    spec, names = read_llama_layout(
        config.changed({"hidden_act": GELU}), qkv_bias=has_bias, output_bias=has_bias, head_dim=256
    )
    spec = with_norm(spec, RMSNorm(spec.norm.eps, zero_centred=True))
    return replace(spec, embedding_scale=spec.width**0.5), names
