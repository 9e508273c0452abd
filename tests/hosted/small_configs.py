"""Small configurations of all causal language models of transformers, by the names that their sizes usually have.

`FIELDS` gives a field its value in whatever configuration has it, nested ones included; `EXCEPTIONS` has what a model
type needs besides. Windows and chunks are shorter than the prompts of the tests, and no multiple of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: Mapping[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 199
EOS_TOKEN_ID = 7
NUM_LAYERS = 4
WINDOW = 11

_NAMES_BY_VALUE: tuple[tuple[Any, str], ...] = (
    (VOCAB_SIZE, "vocab_size n_vocab unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (64, "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim embedding_dim lru_width dim"),
    (64, "input_embedding_size output_embedding_size backbone_hidden_size mm_embed_dim output_proj_dims"),
    (64, "adapter_in_dim"),
    (96, "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dff d_inner dim_ff"),
    (96, "dense_intermediate_size intermediate_size_mlp feed_forward_size shared_intermediate_size"),
    (48, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (48, "expert_ffn_hidden_size moe_shared_expert_intermediate_size prefix_dense_intermediate_size"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers decoder_layers num_blocks"),
    (NUM_LAYERS, "encoder_layers num_encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads num_global_key_value_heads"),
    (16, "head_dim swa_head_dim attention_head_size kv_channels dim_head d_head qk_head_dim"),
    (24, "global_head_dim q_lora_rank"),
    (16, "kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank"),
    (8, "qk_rope_head_dim"),
    (16, "index_head_dim"),
    (4, "index_n_heads index_block_size"),
    (8, "index_topk"),
    (2, "index_topk_blocks"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts n_experts"),
    (3, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers n_groups"),
    (1, "moe_layer_start_index topk_group n_group mamba_n_groups mamba_ngroups num_mtp_layers"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size local_attention"),
    (20, "attention_chunk_size"),
    (2, "sliding_window_pattern full_attention_interval global_attn_every_n_layers attn_layer_period layer_group_size"),
    (1, "attn_layer_offset max_window_layers"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length"),
    (512, "original_max_position_embeddings max_target_positions max_source_positions"),
    (1, "bos_token_id"),
    (EOS_TOKEN_ID, "eos_token_id"),
    (0, "pad_token_id decoder_start_token_id mask_token_id cls_token_id sep_token_id"),
    (True, "is_decoder use_sliding_window"),
    (16, "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_head_dim ssm_state_size"),
    (16, "mamba_d_head state_size"),
    (2, "linear_num_key_heads"),
    (4, "linear_num_value_heads linear_num_heads mamba_n_heads n_mamba_heads mamba_num_heads"),
    (8, "hidden_size_per_layer_input router_hidden_size laurel_rank loop_gate_rank gated_norm_rank adapter_rank"),
    (8, "chunk_size mamba_chunk_size"),
    (1, "mamba_expand expand type_vocab_size pretraining_tp"),
    (2, "hc_mult hc_count n_input_layers n_output_layers"),
)
FIELDS: Mapping[str, Any] = {name: value for value, names in _NAMES_BY_VALUE for name in names.split()}
_MIXED = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_EQUAL_HEADS = {"num_key_value_heads": 4}
# Its layers with windows have sizes of their own.
_DOTS3_NOTE = _EQUAL_HEADS | {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {
        layer_idx: {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16}
        | {"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        for layer_idx in (1, 3)
    },
}
_QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
# Windows where the default has none, heads and states whose sizes depend on others, and what is no size at all.
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note": {"text_config": _DOTS3_NOTE, "vision_config": {"num_hidden_layers": 42}},
    "dots3_note_text": _DOTS3_NOTE,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 5, "layer_types": [*_MIXED, "full_attention"], "num_kv_shared_layers": 1},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "kimi_linear": {"layer_types": _LINEAR, **_EQUAL_HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 24, "head_dim": 8, "zero_expert_num": 2, **_EQUAL_HEADS},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a model type's small configuration.

    Raises:
        Exception: transformers' own, of any class, where it refuses the values.
    """
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_values(config_class, EXCEPTIONS.get(model_type, {})))


def _values(config_class: type[PreTrainedConfig], exceptions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a class's fields that `FIELDS` names, those of its nested ones, and the exceptions."""
    names = {field.name for field in fields(config_class)}
    values = {name: value for name, value in FIELDS.items() if name in names}
    if "kv_lora_rank" in names:  # keys and values are expanded to all heads
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= exceptions
    for name, spec in config_class.sub_configs_defaults.items():
        nested = spec.config_class
        if not issubclass(nested, PreTrainedConfig):
            nested = CONFIG_MAPPING[spec.model_type]
        values[name] = _values(nested, exceptions.get(name, {})) | {"model_type": nested.model_type}
    return values
