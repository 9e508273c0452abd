"""Qwen3-Next and Qwen3.5, dense and with experts: gated delta nets, whose heads have another order, and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import FULL
from quire.models.families.qwen3_5 import RECURRENT
from quire.models.families.qwen3_next import SPLIT_INPUTS
from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    MLP,
    SHARED_EXPERT,
    expert_names,
    has_tensor,
    layers_with,
    matrix_shape,
    read_common,
    read_experts,
    turned_fraction,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, AxisSwap, Change, Config, Floats, Shapes

LAYER: Final = {
    **ATTENTION,
    **MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
# The head for multi-token prediction: a block after the last layer, with its own names for parts that layers lack.
MTP: Final = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head_norm.",
}
MTP_LAYER: Final = {name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
EXPERTS: Final = {"mlp.gate": "ffn_gate_inp", **expert_names("mlp.experts"), **SHARED_EXPERT}
NEXT: Final = {"linear_attn.in_proj_ba": "ssm_ba"}
# Norms whose weights are stored plus one: all except the norms in delta nets.
NORMS: Final = (
    "model.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "enorm.weight",
    "hnorm.weight",
    "shared_head_norm.weight",
)


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    width = {"intermediate_size": metadata.same_integer("feed_forward_length")}
    return _read_layers(metadata, shapes, read_common(metadata, shapes, "Qwen3_5ForCausalLM", floats)) | width


def _read_next(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Qwen3-Next; the fields of all Qwen3.5 are its own."""
    config = _read_moe(metadata, shapes, floats)
    return config | {"architectures": ["Qwen3NextForCausalLM"], SPLIT_INPUTS: True}


def _read_moe(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("expert_count", "expert_shared_count")
    config = read_common(metadata, shapes, "Qwen3_5MoeForCausalLM", floats, reads=reads)
    metadata.require("expert_shared_count", 1)
    metadata.require("expert_weights_norm", True)
    stored_width = matrix_shape(shapes, "blk.0.ffn_gate_shexp.weight")[0]
    width = {"shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length", stored_width)}
    return _read_layers(metadata, shapes, config) | read_experts(metadata, shapes) | width


def _read_layers(metadata: Metadata, shapes: Shapes, config: Config) -> Config:
    """Read the fields of layers, except their FFN."""
    # The layers for multi-token prediction come last and are not part of the decoder. Some files only count them.
    num_blocks = metadata.num_blocks
    num_mtp_layers = metadata.integer("nextn_predict_layers", 0, least=0, most=num_blocks - 1)
    num_layers = num_blocks - num_mtp_layers
    mtp: Config = {}
    if f"blk.{num_layers}.nextn.eh_proj.weight" in shapes:
        has_embeddings = has_tensor(shapes, "nextn.embed_tokens.weight") or has_tensor(
            shapes, "nextn.shared_head_head.weight"
        )
        mtp = {"mtp_num_hidden_layers": num_mtp_layers, "mtp_use_dedicated_embeddings": has_embeddings}
    num_value_heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner % num_value_heads:
        raise metadata.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank ({num_value_heads})")
    is_recurrent = layers_with(shapes, num_layers, "ssm_out.weight")
    rope = {"partial_rotary_factor": turned_fraction(metadata, config["head_dim"])}
    return {
        **config,
        **mtp,
        "num_hidden_layers": num_layers,
        "rope_parameters": config["rope_parameters"] | rope,
        "attention_bias": has_tensor(shapes, "attn_q.bias"),
        "layer_types": [RECURRENT if flag else FULL for flag in is_recurrent],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": inner // num_value_heads,
    }


def _num_key_heads(config: Config) -> tuple[int, int]:
    """Return the number of key heads of a delta net, and of value heads that share one."""
    num_key_heads, num_value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_value_heads % num_key_heads:
        raise CheckpointError(f"{num_value_heads} value heads are no multiple of {num_key_heads} key heads")
    return num_key_heads, num_value_heads // num_key_heads


def _changes(config: Config) -> Mapping[str, Change]:
    """Return the changes: a file tiles value heads over the key heads, the family groups them by key head."""
    num_key_heads, shared = _num_key_heads(config)
    width = config["linear_value_head_dim"]
    start = 2 * num_key_heads * config["linear_key_head_dim"]
    heads = values = joined = None
    if shared > 1:
        heads = AxisSwap(0, 1, shared, num_key_heads, 1)
        values, joined = heads._replace(width=width), heads._replace(width=width, start=start)
    changes = {
        "in_proj_qkv.weight": Change(joined),
        "in_proj_z.weight": Change(values),
        "in_proj_b.weight": Change(heads),
        "in_proj_a.weight": Change(heads),
        "conv1d.weight": Change(joined, layout="unsqueeze_1"),
        "out_proj.weight": Change(column_order=values),
        "A_log": Change(heads, transform="log_negated"),
        "dt_bias": Change(heads),
    }
    return dict.fromkeys(NORMS, Change(transform="minus_one")) | {
        f"linear_attn.{name}": change for name, change in changes.items()
    }


def _next_changes(config: Config) -> Mapping[str, Change]:
    """Return the changes: the two gates of value heads are stored by key head."""
    num_key_heads, shared = _num_key_heads(config)
    changes = {
        "linear_attn.in_proj_ba.weight": Change(AxisSwap(0, 1, num_key_heads, 2, shared)),
        "linear_attn.conv1d.weight": Change(layout="unsqueeze_1"),
        "linear_attn.A_log": Change(transform="log_negated"),
        "mlp.shared_expert_gate.weight": Change(layout="unsqueeze_0"),
    }
    return dict.fromkeys(NORMS, Change(transform="minus_one")) | changes


def _renamed(config: Config, name: str) -> str:
    """Return a name of the head for multi-token prediction as a name in the block after the last layer."""
    prefix = next((prefix for prefix in MTP if name.startswith(prefix)), None)
    if prefix is None:
        return name
    return f"model.layers.{config['num_hidden_layers']}.{MTP[prefix]}{name.removeprefix(prefix)}"


def _moe_changes(config: Config) -> Mapping[str, Change]:
    return {**_changes(config), "mlp.shared_expert_gate.weight": Change(layout="unsqueeze_0")}


QWEN3_5: Final = {
    "qwen3next": Architecture(_read_next, {**LAYER, **EXPERTS, **NEXT}, ENDS, _next_changes),
    "qwen35": Architecture(_read, {**LAYER, **MTP_LAYER}, ENDS, _changes, _renamed),
    "qwen35moe": Architecture(_read_moe, {**LAYER, **EXPERTS}, ENDS, _moe_changes),
}
