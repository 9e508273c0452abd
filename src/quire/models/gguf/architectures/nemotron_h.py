"""Nemotron-H and Nemotron 3: Mamba 2, attention, plain MLPs or experts, one of them in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import FULL
from quire.models.families.nemotron_h import EXPERTS, MLP, RECURRENT
from quire.models.gguf.architectures.common import ENDS, SIGMOID, has_tensor, matrix_shape, read_common
from quire.models.gguf.architectures.mamba import mamba_changes, mamba_names
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Change, Config, Floats, Shapes

LAYER: Final = {
    "norm": "attn_norm",
    **mamba_names("mixer"),
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
NEMOTRON_ENDS: Final = {
    "backbone.embeddings.weight": ENDS["model.embed_tokens.weight"],
    "backbone.norm_f.weight": ENDS["model.norm.weight"],
    "lm_head.weight": ENDS["lm_head.weight"],
}
# A tensor that only layers of one kind have -> the kind. Lists of widths in the metadata can be wrong.
KINDS: Final = {
    "ssm_out.weight": RECURRENT,
    "attn_output.weight": FULL,
    "ffn_gate_inp.weight": EXPERTS,
    "ffn_up.weight": MLP,
}


def _read(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read the layers, without that for multi-token prediction, which is the last block."""
    reads = ("expert_count", "expert_gating_func", "expert_shared_count", "expert_weights_scale")
    config = read_common(metadata, shapes, "NemotronHForCausalLM", floats, reads=reads)
    num_blocks = metadata.num_blocks
    num_layers = num_blocks - metadata.integer("nextn_predict_layers", 0, least=0, most=num_blocks - 1)
    kinds = [_kind(shapes, idx) for idx in range(num_layers)]
    num_heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner % num_heads:
        raise metadata.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank ({num_heads})")
    config |= {
        "num_hidden_layers": num_layers,
        "layers_block_type": kinds,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "attention_bias": has_tensor(shapes, "attn_q.bias"),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner // num_heads,
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": has_tensor(shapes, "ssm_in.bias"),
        "use_conv_bias": has_tensor(shapes, "ssm_conv1d.bias"),
        "mlp_bias": has_tensor(shapes, "ffn_up.bias"),
    }
    if MLP in kinds:
        config["intermediate_size"] = matrix_shape(shapes, f"blk.{kinds.index(MLP)}.ffn_up.weight")[0]
    return config | _experts(metadata) if EXPERTS in kinds else config


def _experts(metadata: Metadata) -> Config:
    metadata.require("expert_gating_func", 0, SIGMOID)
    metadata.require("moe_latent_size", 0)
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 1),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
    }


def _kind(shapes: Shapes, idx: int) -> str:
    for tensor, kind in KINDS.items():
        if f"blk.{idx}.{tensor}" in shapes:
            return kind
    raise CheckpointError(f"block {idx} has none of the tensors {', '.join(KINDS)}", field=f"blk.{idx}")


def _changes(_config: Config) -> Mapping[str, Change]:
    return mamba_changes("mixer")


def _renamed(_config: Config, name: str) -> str:
    return name.replace("backbone.layers.", "model.layers.")


NEMOTRON_H: Final = dict.fromkeys(
    ("nemotron_h", "nemotron_h_moe"), Architecture(_read, LAYER, NEMOTRON_ENDS, _changes, _renamed)
)
