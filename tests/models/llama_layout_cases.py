"""Tiny models of families near Llama's layout, for the tests of all families."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SPECIAL: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

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
    # A window in the layers that are not rotated.
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {**HEADS, **SPECIAL, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 9},
    ),
    "smollm3-options": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {
            **SPECIAL,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "seed-oss": (SeedOssConfig, SeedOssForCausalLM, {**HEADS, "head_dim": 24}),
    "seed-oss-options": (
        SeedOssConfig,
        SeedOssForCausalLM,
        {
            **HEADS,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": (GemmaConfig, GemmaForCausalLM, {**HEADS, "num_key_value_heads": 1}),
    "gemma-options": (
        GemmaConfig,
        GemmaForCausalLM,
        {**HEADS, "head_dim": 24, "hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False},
    ),
    "glm": (GlmConfig, GlmForCausalLM, {**HEADS, **SPECIAL, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {**HEADS, **SPECIAL, "head_dim": 24, "num_key_value_heads": 4}),
    "glm4-moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            **HEADS,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-options": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            **HEADS,
            "head_dim": 24,
            "use_qk_norm": True,
            "first_k_dense_replace": 0,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"num_attention_heads": 4}),
    "olmo2-options": (
        Olmo2Config,
        Olmo2ForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 4, "sliding_window": 9},
    ),
    # A scaling of the layers without a window.
    "olmo3-options": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "rotary_dim": 8},
    ),
}
