"""Architectures with Mamba 2: granitehybrid and falcon-h1; and granite and granitemoe, which are Granite without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.models.families.expert_layout import LINEAR_EXPERTS
from quire.models.families.granitemoehybrid import RECURRENT
from quire.models.families.hf_config import FULL
from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    NORMS,
    expert_names,
    has_tensor,
    layers_with,
    matrix_shape,
    paired_rows,
    read_common,
    whole_layers,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Change, Config, Floats, Shapes


def mamba_names(module: str) -> dict[str, str]:
    """Return the names of recurrent layers, whose tensors have the prefix `module` in the family."""
    names = {
        "in_proj": "ssm_in",
        "conv1d": "ssm_conv1d",
        "out_proj": "ssm_out",
        "norm": "ssm_norm",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "D": "ssm_d",
    }
    return {f"{module}.{ours}": theirs for ours, theirs in names.items()}


def mamba_changes(module: str) -> dict[str, Change]:
    """Return the changes of tensors of recurrent layers, which have the prefix `module` in the family."""
    changes = {
        "conv1d.weight": Change(layout="unsqueeze_1"),
        "norm.weight": Change(layout="flatten"),
        "A_log": Change(transform="log_negated", layout="flatten"),
        "D": Change(layout="flatten"),
    }
    return {f"{module}.{name}": change for name, change in changes.items()}


GRANITE: Final[dict[str, str | tuple[str, ...]]] = {
    **ATTENTION,
    **NORMS,
    **mamba_names("mamba"),
    # Gate and up are one matrix in the family.
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear": "ffn_down",
    # In models with experts, it has other names; see `_granite_renamed`.
    "shared_expert.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "shared_expert.output_linear": "ffn_down_shexp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    **expert_names("block_sparse_moe.experts"),
}
FALCON_H1: Final = {
    **ATTENTION,
    **mamba_names("mamba"),
    "input_layernorm": "attn_norm",
    # This name has no suffix.
    "pre_ff_layernorm.weight": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
# Multipliers of Granite; a missing field is 1.
GRANITE_SCALES: Final = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _read_granite(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Granite without recurrent layers as Granite 4, which has the same attention layers."""
    config = _read_granite_common(metadata, shapes, floats)
    metadata.same_integer("attention.head_count_kv")
    return config | {"layer_types": [FULL] * config["num_hidden_layers"]}


def _read_granite_hybrid(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    config = _read_granite_common(metadata, shapes, floats)
    inner, width = metadata.integer("ssm.inner_size"), config["hidden_size"]
    if inner % width:
        raise metadata.wrong("ssm.inner_size", inner, f"a multiple of embedding_length ({width})")
    is_recurrent = layers_with(shapes, config["num_hidden_layers"], "ssm_out.weight")
    return (
        config
        | _read_mamba(metadata, shapes)
        | {
            "mamba_expand": inner // width,
            "layer_types": [RECURRENT if flag else FULL for flag in is_recurrent],
        }
    )


def _read_granite_common(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("attention.scale", "expert_count", "expert_shared_count", *GRANITE_SCALES.values())
    config = read_common(metadata, shapes, "GraniteMoeHybridForCausalLM", floats, reads=reads)
    metadata.require("rope.dimension_count", config["head_dim"])
    return (
        config
        | {field: metadata.number(name, 1.0) for field, name in GRANITE_SCALES.items()}
        | {
            # In these architectures, this field switches the rotation on and off.
            "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope",
            "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
            "attention_bias": has_tensor(shapes, "attn_q.bias"),
        }
        | _read_granite_ffn(metadata, shapes)
    )


def _read_granite_ffn(metadata: Metadata, shapes: Shapes) -> Config:
    """Read the width of the gated MLP, or the experts and the width of the shared expert, 0 without one."""
    num_experts, width = metadata.integer("expert_count", 0, least=0), metadata.same_integer("feed_forward_length")
    if not num_experts:
        return {"num_local_experts": 0, "shared_intermediate_size": width}
    metadata.require("expert_shared_count", 0, 1)
    shared = "blk.0.ffn_gate_shexp.weight"
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length", width),
        "shared_intermediate_size": matrix_shape(shapes, shared)[0] if shared in shapes else 0,
        LINEAR_EXPERTS: True,
    }


def _granite_renamed(config: Config, name: str) -> str:
    return name.replace(".shared_mlp.", ".shared_expert.") if config["num_local_experts"] else name


def _read_falcon_h1(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Falcon-H1, whose multipliers are folded into the file's weights."""
    config = read_common(metadata, shapes, "FalconH1ForCausalLM", floats)
    has_norm = has_tensor(shapes, "ssm_norm.weight")
    return (
        config
        | whole_layers(metadata, config["head_dim"])
        | _read_mamba(metadata, shapes)
        | {
            "mamba_d_ssm": metadata.integer("ssm.inner_size"),
            "mamba_rms_norm": has_norm,
            "mamba_norm_before_gate": False,
            "projectors_bias": has_tensor(shapes, "ssm_out.bias"),
            "attention_bias": has_tensor(shapes, "attn_q.bias"),
            "mlp_bias": has_tensor(shapes, "ffn_up.bias"),
        }
    )


def _read_mamba(metadata: Metadata, shapes: Shapes) -> Config:
    """Read the heads of recurrent layers."""
    return {
        "mamba_n_heads": metadata.integer("ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": has_tensor(shapes, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(shapes, "ssm_in.bias"),
    }


def _granite_changes(config: Config) -> Mapping[str, Change]:
    return mamba_changes("mamba") | paired_rows(config)


def _falcon_changes(_config: Config) -> Mapping[str, Change]:
    return mamba_changes("mamba")


MAMBA_LAYOUT: Final[dict[str, Architecture]] = {
    "granite": Architecture(_read_granite, GRANITE, ENDS, _granite_changes),
    "granitemoe": Architecture(_read_granite, GRANITE, ENDS, _granite_changes, _granite_renamed),
    "granitehybrid": Architecture(_read_granite_hybrid, GRANITE, ENDS, _granite_changes, _granite_renamed),
    "falcon-h1": Architecture(
        _read_falcon_h1, FALCON_H1, ENDS | {"model.final_layernorm.weight": "output_norm.weight"}, _falcon_changes
    ),
}
