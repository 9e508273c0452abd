"""The metadata that a converter to GGUF makes of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, Final

import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Config = dict[str, Any]
FULL, WINDOWED = "full_attention", "sliding_attention"


def _granite(config: Config) -> MODEL_ARCH:
    if set(config["layer_types"]) != {FULL}:
        return MODEL_ARCH.GRANITE_HYBRID
    return MODEL_ARCH.GRANITE_MOE if config["num_local_experts"] else MODEL_ARCH.GRANITE


def _nemotron_h(config: Config) -> MODEL_ARCH:
    return MODEL_ARCH.NEMOTRON_H_MOE if "moe" in config["layers_block_type"] else MODEL_ARCH.NEMOTRON_H


ARCHITECTURES: Final[dict[str, Callable[[Config], MODEL_ARCH]]] = {
    "LlamaForCausalLM": lambda _: MODEL_ARCH.LLAMA,
    "MistralForCausalLM": lambda _: MODEL_ARCH.LLAMA,
    "Ministral3ForCausalLM": lambda _: MODEL_ARCH.MISTRAL3,
    "GraniteMoeForCausalLM": lambda _: MODEL_ARCH.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": lambda _: MODEL_ARCH.GRANITE_MOE,
    "SmolLM3ForCausalLM": lambda _: MODEL_ARCH.SMOLLM3,
    "SeedOssForCausalLM": lambda _: MODEL_ARCH.SEED_OSS,
    "GemmaForCausalLM": lambda _: MODEL_ARCH.GEMMA,
    "GlmForCausalLM": lambda _: MODEL_ARCH.CHATGLM,
    "Glm4ForCausalLM": lambda _: MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": lambda _: MODEL_ARCH.GLM4_MOE,
    "Olmo2ForCausalLM": lambda _: MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": lambda _: MODEL_ARCH.OLMO2,
    "MiniMaxM2ForCausalLM": lambda _: MODEL_ARCH.MINIMAXM2,
    "MixtralForCausalLM": lambda _: MODEL_ARCH.LLAMA,
    "Llama4ForCausalLM": lambda _: MODEL_ARCH.LLAMA4,
    "Qwen2ForCausalLM": lambda _: MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": lambda _: MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": lambda _: MODEL_ARCH.QWEN3MOE,
    "Qwen3NextForCausalLM": lambda _: MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": lambda _: MODEL_ARCH.QWEN35,
    "GptOssForCausalLM": lambda _: MODEL_ARCH.GPT_OSS,
    "Phi3ForCausalLM": lambda _: MODEL_ARCH.PHI3,
    "Qwen3_5MoeForCausalLM": lambda _: MODEL_ARCH.QWEN35MOE,
    "Qwen3_5ForConditionalGeneration": lambda _: MODEL_ARCH.QWEN35,
    "Qwen3VLForConditionalGeneration": lambda _: MODEL_ARCH.QWEN3VL,
    "Gemma2ForCausalLM": lambda _: MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": lambda _: MODEL_ARCH.GEMMA3,
    "Gemma3ForConditionalGeneration": lambda _: MODEL_ARCH.GEMMA3,
    "Gemma3nForCausalLM": lambda _: MODEL_ARCH.GEMMA3N,
    "Gemma4ForCausalLM": lambda _: MODEL_ARCH.GEMMA4,
    "Lfm2ForCausalLM": lambda _: MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": lambda _: MODEL_ARCH.LFM2MOE,
    "GraniteMoeHybridForCausalLM": _granite,
    "FalconH1ForCausalLM": lambda _: MODEL_ARCH.FALCON_H1,
    "NemotronHForCausalLM": _nemotron_h,
    "GPT2LMHeadModel": lambda _: MODEL_ARCH.GPT2,
}


# Architectures whose files have other widths of MLPs than those of `_add_mlp_width`.
OWN_MLP_WIDTHS: Final = {MODEL_ARCH.LLAMA4, MODEL_ARCH.NEMOTRON_H, MODEL_ARCH.NEMOTRON_H_MOE}
# Architectures whose files have the number of KV heads of each layer, 0 without attention.
KV_HEADS_BY_LAYER: Final = {
    MODEL_ARCH.LFM2,
    MODEL_ARCH.LFM2MOE,
    MODEL_ARCH.GRANITE_HYBRID,
    MODEL_ARCH.NEMOTRON_H,
    MODEL_ARCH.NEMOTRON_H_MOE,
}


def common_names(config: Config) -> Config:
    """Return a configuration with the names of most families for fields that a family names otherwise."""
    if config["model_type"] == "gpt2":
        names = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer"}
        names |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), "n_head")
        return config | {ours: config[theirs] for ours, theirs in names.items()} | {"rope_parameters": {}}
    if "layers_block_type" not in config:
        return config
    return config | {
        "layer_types": config["layers_block_type"],
        "num_hidden_layers": len(config["layers_block_type"]),
        "rms_norm_eps": config["layer_norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


def add_fields(writer: GGUFWriter, config: Config, architecture: MODEL_ARCH) -> None:
    """Write the fields of all architectures, then those of one."""
    writer.add_block_count(config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count(config["num_attention_heads"])
    if architecture is MODEL_ARCH.GPT2:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        return
    writer.add_layer_norm_rms_eps(config["norm_eps"] if "norm_eps" in config else config["rms_norm_eps"])
    head_dim = config.get("head_dim")
    if architecture is not MODEL_ARCH.GEMMA4:
        if architecture not in OWN_MLP_WIDTHS:
            _add_mlp_width(writer, config)
        if head_dim is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    kinds = config.get("layer_types") or []
    if architecture in KV_HEADS_BY_LAYER:
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == FULL) for kind in kinds])
    elif architecture is not MODEL_ARCH.GEMMA4:
        writer.add_head_count_kv(config["num_key_value_heads"])
    _add_rope(writer, config)
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("top_k_experts") or config["num_experts_per_tok"])
    own = FIELDS.get(architecture)
    if own is not None:
        own(writer, config)


def frequency_factors(config: Config) -> dict[str, Tensor]:
    """Return the tensors of factors of wavelengths that a file has."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    factors = _frequency_factors(config, rope)
    return {} if factors is None else {"rope_freqs.weight": factors}


def _frequency_factors(config: Config, rope: Config) -> Tensor | None:
    """Return the factors for rotations of Llama 3, and those of parts of heads."""
    full = rope.get(FULL, rope)
    if full.get("rope_type") == "proportional":
        size = _of_full_layers(config)["head_dim"]
        num_turned = int(size * full["partial_rotary_factor"] / 2)
        return torch.tensor([1.0] * num_turned + [1e30] * (size // 2 - num_turned))
    if full.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    namespace = SimpleNamespace(**config, standardize_rope_params=lambda: None)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](namespace, torch.device("cpu"))
    plain = full["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    factors: Tensor = plain / scaled
    return factors


def _add_mlp_width(writer: GGUFWriter, config: Config) -> None:
    width = config.get("intermediate_size")
    if not config.get("num_local_experts"):
        width = config.get("shared_intermediate_size") or width
    if width is None:
        return
    if config.get("block_auto_adjust_ff_dim"):
        step = config["block_multiple_of"]
        width = -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // step) * step
    writer.add_feed_forward_length(width)


def _add_rope(writer: GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    full = rope.get(FULL, rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if WINDOWED in rope:
        writer.add_rope_freq_base_swa(rope[WINDOWED]["rope_theta"])
    kinds = {"linear": RopeScalingType.LINEAR, "yarn": RopeScalingType.YARN}
    if full["rope_type"] in kinds:
        writer.add_rope_scaling_type(kinds[full["rope_type"]])
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])


def _llama(writer: GGUFWriter, config: Config) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _ministral3(writer: GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _llama4(writer: GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_rope_dimension_count(config["head_dim"])


def _olmo2(writer: GGUFWriter, config: Config) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == WINDOWED for kind in config["layer_types"]])


def _minimax_m2(writer: GGUFWriter, config: Config) -> None:
    _glm4(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _glm4(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def _glm4_moe(writer: GGUFWriter, config: Config) -> None:
    _glm4(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _phi3(writer: GGUFWriter, config: Config) -> None:
    rope, head_dim = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])


def _gpt_oss(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_scaling_yarn_beta_fast(config["rope_parameters"]["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(config["rope_parameters"]["beta_slow"])


def _qwen3_moe(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _qwen3_5(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if "mtp_num_hidden_layers" in config:
        writer.add_nextn_predict_layers(config["mtp_num_hidden_layers"])
    fraction = config["rope_parameters"].get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * fraction))
    _add_sections(writer, config)


def _qwen3_vl(writer: GGUFWriter, config: Config) -> None:
    _add_sections(writer, config)
    writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))


def _add_sections(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_sections([*config["rope_parameters"].get("mrope_section", (11, 11, 10)), 0])


def _qwen3_5_moe(writer: GGUFWriter, config: Config) -> None:
    _qwen3_5(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _gemma3(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    pattern = [kind == WINDOWED for kind in config["layer_types"]]
    if pattern != [(idx + 1) % 6 > 0 for idx in range(len(pattern))]:
        writer.add_sliding_window_pattern(pattern)


def _gemma2(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3n(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == WINDOWED for kind in config["layer_types"]])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -math.inf for share in shares])


def _of_full_layers(config: Config) -> Config:
    """Return the configuration of Gemma 4's layers that see all tokens."""
    config_of = config["per_layer_config"]
    own: Config = config_of[str(config["layer_types"].index(FULL))]
    return config | own


def _gemma4(writer: GGUFWriter, config: Config) -> None:
    pattern = [kind == WINDOWED for kind in config["layer_types"]]
    of_full = _of_full_layers(config)
    num_shared, full = config["num_kv_shared_layers"], of_full["head_dim"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(pattern)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    width, num_own = config["intermediate_size"], len(pattern) - num_shared
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width * (1 + (idx >= num_own)) for idx in range(len(pattern))])
    else:
        writer.add_feed_forward_length(width)
    near, far = config["num_key_value_heads"], of_full["num_key_value_heads"]
    writer.add_head_count_kv([near if has_window else far for has_window in pattern] if far != near else near)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _lfm2(writer: GGUFWriter, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _lfm2_moe(writer: GGUFWriter, config: Config) -> None:
    _lfm2(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _granite_scales(writer: GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config["num_local_experts"] and config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _granite_hybrid(writer: GGUFWriter, config: Config) -> None:
    _granite_scales(writer, config)
    _mamba(writer, config)
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def _mamba(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config.get("mamba_d_ssm") or config["hidden_size"] * config["mamba_expand"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _nemotron_h_fields(writer: GGUFWriter, config: Config) -> None:
    kinds = config["layers_block_type"]
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    if "moe" not in kinds:
        writer.add_feed_forward_length([config["intermediate_size"] * (kind == "mlp") for kind in kinds])
        return
    writer.add_feed_forward_length([config["moe_intermediate_size"] * (kind == "moe") for kind in kinds])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])


FIELDS: Final[dict[MODEL_ARCH, Callable[[GGUFWriter, Config], None]]] = {
    MODEL_ARCH.LLAMA: _llama,
    MODEL_ARCH.MISTRAL3: _ministral3,
    MODEL_ARCH.LLAMA4: _llama4,
    MODEL_ARCH.SMOLLM3: _llama,
    MODEL_ARCH.OLMO2: _olmo2,
    MODEL_ARCH.MINIMAXM2: _minimax_m2,
    MODEL_ARCH.CHATGLM: _glm4,
    MODEL_ARCH.GLM4: _glm4,
    MODEL_ARCH.GLM4_MOE: _glm4_moe,
    MODEL_ARCH.GPT_OSS: _gpt_oss,
    MODEL_ARCH.PHI3: _phi3,
    MODEL_ARCH.QWEN3MOE: _qwen3_moe,
    MODEL_ARCH.QWEN3NEXT: _qwen3_5_moe,
    MODEL_ARCH.QWEN35: _qwen3_5,
    MODEL_ARCH.QWEN3VL: _qwen3_vl,
    MODEL_ARCH.QWEN35MOE: _qwen3_5_moe,
    MODEL_ARCH.GEMMA2: _gemma2,
    MODEL_ARCH.GEMMA3: _gemma3,
    MODEL_ARCH.GEMMA3N: _gemma3n,
    MODEL_ARCH.GEMMA4: _gemma4,
    MODEL_ARCH.LFM2: _lfm2,
    MODEL_ARCH.LFM2MOE: _lfm2_moe,
    MODEL_ARCH.GRANITE: _granite_scales,
    MODEL_ARCH.GRANITE_MOE: _granite_scales,
    MODEL_ARCH.GRANITE_HYBRID: _granite_hybrid,
    MODEL_ARCH.FALCON_H1: _mamba,
    MODEL_ARCH.NEMOTRON_H: _nemotron_h_fields,
    MODEL_ARCH.NEMOTRON_H_MOE: _nemotron_h_fields,
}
