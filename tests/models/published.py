"""The fields of well-known models' configurations that say what they keep of a sequence, and how large they are."""

from __future__ import annotations

from typing import Any


def rope_parameter(config: Any, name: str) -> float:
    """Return a rotary parameter of one of transformers' configurations, which type it as possibly missing."""
    return float(config.rope_parameters[name])


def llama(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Return the configuration of a model of Llama's layout."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    } | more


def gemma4(**text: Any) -> dict[str, Any]:
    """Return the configuration of a Gemma 4, with the fields of its text that differ from one size to another."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma4_text",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "sliding_window": 512,
            "vocab_size": 262144,
        }
        | text,
    }


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# The factors are of another kind: published ones are long lists of no pattern.
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [2.0] * 48},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 2 7B": llama(4096, 32, 32, 32, 11008, 32000),
    "Llama 3.1 8B": llama(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=131072),
    "Llama 3.1 70B": llama(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=131072),
    "Qwen2.5 7B": llama(
        3584, 28, 28, 4, 18944, 152064, **QWEN2, sliding_window=131072, use_sliding_window=False, max_window_layers=28
    ),
    "Qwen3 0.6B": llama(1024, 28, 16, 8, 3072, 151936, **QWEN3, tie_word_embeddings=True, sliding_window=None),
    "Qwen3 8B": llama(4096, 36, 32, 8, 12288, 151936, **QWEN3),
    "Qwen3 32B": llama(5120, 64, 64, 8, 25600, 151936, **QWEN3),
    "Mistral 7B v0.1": llama(
        4096, 32, 32, 8, 14336, 32000, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=4096
    ),
    "Gemma 3 4B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "Gemma 3 27B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    },
    "Gemma 4 E2B": gemma4(
        hidden_size=1536, num_hidden_layers=35, num_key_value_heads=1, intermediate_size=6144, num_kv_shared_layers=20,
        use_double_wide_mlp=True, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    ),
    "Gemma 4 E4B": gemma4(
        hidden_size=2560, num_hidden_layers=42, num_key_value_heads=2, intermediate_size=10240, num_kv_shared_layers=18,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7,
    ),
    "Gemma 4 31B": gemma4(
        hidden_size=5376, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, attention_k_eq_v=True, intermediate_size=21504, sliding_window=1024,
        hidden_size_per_layer_input=0, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10,
    ),
    "Gemma 4 26B A4B": gemma4(
        hidden_size=2816, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, intermediate_size=2112, sliding_window=1024,
        hidden_size_per_layer_input=0, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "Llama 4 Scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": llama(
            5120, 48, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128, attention_chunk_size=8192,
            num_local_experts=16,
        ),
    },
    "Mixtral 8x7B": llama(
        4096, 32, 32, 8, 14336, 32000, architectures=["MixtralForCausalLM"], model_type="mixtral", sliding_window=None,
        num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
    ),
    "Qwen3 30B A3B": llama(
        2048, 48, 32, 4, 6144, 151936, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, use_sliding_window=False, sliding_window=None, max_position_embeddings=40960,
    ),
    "LFM2 1.2B": llama(
        2048, 16, 32, 8, 0, 65536, architectures=["Lfm2ForCausalLM"], model_type="lfm2", conv_L_cache=3,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], block_ff_dim=12288, block_auto_adjust_ff_dim=True, block_multiple_of=256,
    ),
    "LFM2 8B A1B": llama(
        2048, 24, 32, 8, 7168, 65536, architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", conv_L_cache=3,
        layer_types=["full_attention" if idx in (2, 6, 10, 14, 18, 21) else "conv" for idx in range(24)],
        moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4, num_dense_layers=2, norm_topk_prob=True,
        use_expert_bias=True, routed_scaling_factor=1.0, tie_embedding=True,
    ),
    "Granite 4.0 H-350M": llama(
        768, 32, 12, 4, 2048, 100352, architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        layer_types=["attention" if idx in (10, 13, 17, 27) else "mamba" for idx in range(32)], num_local_experts=0,
        shared_intermediate_size=2048, tie_word_embeddings=True, mamba_n_heads=48, mamba_n_groups=1, mamba_d_state=128,
        mamba_d_conv=4, mamba_expand=2,
    ),
    "Granite 4.0 H-Tiny": llama(
        1536, 40, 12, 4, 512, 100352, architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        layer_types=["attention" if idx in (5, 15, 25, 35) else "mamba" for idx in range(40)], num_local_experts=64,
        num_experts_per_tok=6, shared_intermediate_size=1024, tie_word_embeddings=True, mamba_n_heads=48,
        mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
    ),
    "Falcon-H1 0.5B": llama(
        1024, 36, 8, 2, 2048, 32784, architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", head_dim=64,
        attention_in_multiplier=1.0, attention_out_multiplier=0.9375, key_multiplier=0.390625, ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23570226039551587, mlp_multipliers=[0.8838834764831844, 0.5859375], mamba_rms_norm=False,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], mamba_use_mlp=True,
        embedding_multiplier=5.656854249492381, lm_head_multiplier=0.0390625, attn_layer_indices=None, mamba_expand=2,
        mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4,
        mamba_norm_before_gate=False, max_position_embeddings=16384,
    ),
    "Granite 3.3 8B": llama(
        4096, 40, 32, 8, 12800, 49159, architectures=["GraniteForCausalLM"], model_type="granite", attention_bias=False,
        tie_word_embeddings=True, attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=16.0, max_position_embeddings=131072,
    ),
    "SmolLM3 3B": llama(
        2048, 36, 16, 4, 11008, 128256, architectures=["SmolLM3ForCausalLM"], model_type="smollm3",
        no_rope_layers=[1, 1, 1, 0] * 9, tie_word_embeddings=True, use_sliding_window=False, sliding_window=None,
        max_position_embeddings=65536,
    ),
    "Seed-OSS 36B": llama(
        5120, 64, 80, 8, 27648, 155136, architectures=["SeedOssForCausalLM"], model_type="seed_oss", head_dim=128,
        attention_bias=True, attention_out_bias=False, max_position_embeddings=524288, rope_theta=10000000.0,
    ),
    "Ministral 3 8B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": llama(
            4096, 34, 32, 8, 14336, 131072, model_type="ministral3", head_dim=128, max_position_embeddings=262144,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    },
    "GLM-4.5 Air": llama(
        4096, 46, 96, 8, 10944, 151552, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", head_dim=128,
        attention_bias=True, partial_rotary_factor=0.5, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=1408, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        n_group=1, topk_group=1, use_qk_norm=False, max_position_embeddings=131072, rms_norm_eps=1e-5,
    ),
    "OLMo 3 7B": llama(
        4096, 32, 32, 32, 11008, 100278, architectures=["Olmo3ForCausalLM"], model_type="olmo3", sliding_window=4096,
        attention_bias=False, max_position_embeddings=65536, rope_theta=500000,
        rope_scaling={
            "rope_type": "yarn", "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": 8192,
        },
    ),
    "MiniMax M2": llama(
        3072, 62, 48, 8, 1536, 200064, architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", head_dim=128,
        num_local_experts=256, num_experts_per_tok=8, rotary_dim=64, scoring_func="sigmoid", use_qk_norm=True,
        qk_norm_type="per_layer", use_routing_bias=True, max_position_embeddings=196608, rope_theta=5000000,
    ),
    "Phi-3.5 mini": llama(
        3072, 32, 32, 32, 8192, 32064, **PHI3, sliding_window=262144, tie_word_embeddings=False,
    ),
    "Phi-4 mini": llama(
        3072, 32, 24, 8, 8192, 200064, **PHI3, sliding_window=262144, tie_word_embeddings=True,
        partial_rotary_factor=0.75, lm_head_bias=False, mlp_bias=False, full_attn_mod=1,
    ),
    "gpt-oss 20B": llama(
        2880, 24, 64, 8, 2880, 201088, architectures=["GptOssForCausalLM"], model_type="gpt_oss", head_dim=64,
        attention_bias=True, hidden_act="silu", layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072, num_experts_per_tok=4, num_local_experts=32, rope_theta=150000,
        quantization_config={"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        rms_norm_eps=1e-5, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
    ),
    "Qwen3-Next 80B A3B": llama(
        2048, 48, 16, 2, 5120, 151936, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", head_dim=256,
        **DELTA_NET, linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, mlp_only_layers=[],
        decoder_sparse_step=1, norm_topk_prob=True, partial_rotary_factor=0.25, rope_theta=10000000,
        max_position_embeddings=262144,
    ),
    "Nemotron Nano 9B v2": llama(
        4480, 56, 40, 8, 15680, 131072, architectures=["NemotronHForCausalLM"], model_type="nemotron_h", head_dim=128,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", mamba_num_heads=128,
        mamba_head_dim=80, n_groups=8, ssm_state_size=128, conv_kernel=4, mlp_hidden_act="relu2", use_bias=False,
        layer_norm_epsilon=1e-5, max_position_embeddings=131072,
    ),
    "Nemotron 3 Nano 30B A3B": llama(
        2688, 52, 32, 2, 1856, 131072, architectures=["NemotronHForCausalLM"], model_type="nemotron_h", head_dim=128,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_num_heads=64,
        mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, mlp_hidden_act="relu2", n_routed_experts=128,
        num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1,
        topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, max_position_embeddings=262144,
    ),
    "Bamba 9B": llama(
        4096, 32, 32, 8, 14336, 128256, architectures=["BambaForCausalLM"], model_type="bamba", mamba_n_heads=128,
        attn_layer_indices=[9, 18, 27], mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        mamba_d_head=64, max_position_embeddings=262144,
    ),
    "Qwen3.5 of 24 layers": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": llama(
            1024, 24, 8, 2, 3584, 248320, model_type="qwen3_5_text", head_dim=256, **DELTA_NET,
            linear_num_key_heads=16, linear_num_value_heads=16, mamba_ssm_dtype="float32", attn_output_gate=True,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        ),
    },
    "Qwen3.5 35B A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": llama(
            2048, 40, 16, 2, 0, 248320, model_type="qwen3_5_moe_text", head_dim=256, **DELTA_NET,
            linear_num_key_heads=16, linear_num_value_heads=32, mamba_ssm_dtype="float32", attn_output_gate=True,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
    },
}  # fmt: skip
