"""Tiny models of families near Llama's layout, for the tests of all families."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
)

# Every multiplier is another number.
GRANITE: Final[dict[str, Any]] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}
LLAMA_LAYOUT_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    # Prompts cross positions at which the temperature changes.
    "ministral3": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 10,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, GRANITE | {"tie_word_embeddings": True}),
    "granite-biases": (GraniteConfig, GraniteForCausalLM, GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": (
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "attention_bias": True},
    ),
    "granitemoeshared": (
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        GRANITE | {"num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 56},
    ),
}
