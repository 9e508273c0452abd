"""Fields and names that the architectures of GGUF files share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.families.expert_layout import LINEAR_EXPERTS, PARTS
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import AxisSwap, Change, Config, Floats, Shapes

FREQUENCY_FACTORS: Final = "rope_freqs.weight"
ENDS: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ATTENTION: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
MLP: Final = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
NORMS: Final = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
LLAMA: Final = {**ATTENTION, **MLP, **NORMS}
SHARED_EXPERT: Final = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Fields that change the computation of a model, and their neutral values.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
# Number of the sigmoid among the functions of scores.
SIGMOID: Final = 2
# A file has the results of Llama 3's scaling and not its parameters. These are the known parameters: pairs of low and
# high frequency factors, and the original context.
LLAMA3_FACTORS: Final = ((1.0, 4.0), (1.0, 1.0))
LLAMA3_CONTEXT: Final = 8192


def read_common(
    metadata: Metadata, shapes: Shapes, family: str, floats: Floats | None, *, reads: Collection[str] = ()
) -> Config:
    """Read the fields of most families, and refuse values that would change the computation."""
    refuse_changes(metadata, reads)
    vocab_size, width = matrix_shape(shapes, "token_embd.weight")
    if metadata.integer("embedding_length") != width:
        raise metadata.wrong("embedding_length", metadata.integer("embedding_length"), f"the embedding's width {width}")
    num_heads = metadata.same_integer("attention.head_count")
    default = width // num_heads
    head_dim = metadata.integer("attention.key_length", default)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(
            f"the field {metadata.key('attention.value_length')} must be that of the keys, {head_dim}",
            field=metadata.key("attention.value_length"),
        )
    has_kv_heads = metadata.has("attention.head_count_kv")
    return {
        "architectures": [family],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": metadata.num_blocks,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(metadata.integers("attention.head_count_kv")) if has_kv_heads else num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": read_rope(metadata, reads)
        | ({} if FREQUENCY_FACTORS in reads else _read_llama3(metadata, shapes, head_dim, floats)),
    }


def refuse_changes(metadata: Metadata, reads: Collection[str] = ()) -> None:
    """Refuse values that would change the computation, of fields that are not among those that are read."""
    for name, allowed in NEUTRAL.items():
        if name not in reads:
            metadata.require(name, *allowed)


def read_dense(metadata: Metadata, shapes: Shapes, family: str, floats: Floats | None) -> Config:
    """Read a model with the same attention and gated MLP in all layers, and rotation of whole heads."""
    config = read_common(metadata, shapes, family, floats)
    return config | whole_layers(metadata, config["head_dim"])


def whole_layers(metadata: Metadata, head_dim: int) -> Config:
    """Read the width of the gated MLPs, and check that all layers have equal shapes and rotate whole heads."""
    metadata.require("rope.dimension_count", head_dim)
    if metadata.has("attention.head_count_kv"):
        metadata.same_integer("attention.head_count_kv")
    return {"intermediate_size": metadata.same_integer("feed_forward_length")}


def turned_fraction(metadata: Metadata, head_dim: int) -> float:
    """Return the rotated fraction of a head, rounded up if truncation of its product with `head_dim` needs it."""
    num_turned = metadata.integer("rope.dimension_count", most=head_dim)
    fraction = num_turned / head_dim
    return fraction if int(head_dim * fraction) == num_turned else math.nextafter(fraction, 1.0)


def expert_names(module: str, parts: tuple[str, str, str] = PARTS) -> dict[str, str]:
    """Return the names of experts: one by one, or all experts of a layer in one tensor, with gates and ups joined."""
    gate, up, down = parts
    return {
        f"{module}.{gate}": "ffn_gate_exps",
        f"{module}.{up}": "ffn_up_exps",
        f"{module}.{down}.weight": "ffn_down_exps.weight",
        f"{module}.{down}": "ffn_down_exps.weight",  # all experts of a layer
        f"{module}.gate_up_proj": "ffn_gate_up_exps.weight",
    }


def read_experts(metadata: Metadata, shapes: Shapes) -> Config:
    """Read the number of experts, their width, and whether they are linear layers (`LINEAR_EXPERTS`)."""
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        LINEAR_EXPERTS: not has_tensor(shapes, "ffn_gate_up_exps.weight"),
    }


def matrix_shape(shapes: Shapes, name: str) -> tuple[int, int]:
    """Return the rows and columns of a matrix."""
    shape = shapes.get(name, ())
    if len(shape) != 2:
        raise CheckpointError(f"the file has no matrix {name}", field=name)
    return shape[0], shape[1]


def has_tensor(shapes: Shapes, ending: str) -> bool:
    """Return whether any layer has a tensor with this ending of its name."""
    return any(name.startswith("blk.") and name.endswith(f".{ending}") for name in shapes)


def layers_with(shapes: Shapes, num_layers: int, tensor: str) -> tuple[bool, ...]:
    """Return whether each layer has a tensor."""
    return tuple(f"blk.{idx}.{tensor}" in shapes for idx in range(num_layers))


def paired_rows(config: Config) -> dict[str, Change]:
    """Return the changes of query and key projections whose rows alternate between the halves of a head."""
    half, remainder = divmod(config["head_dim"], 2)
    if remainder:
        raise CheckpointError(f"heads must be of an even length, got {config['head_dim']}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {
        f"self_attn.{name}.{kind}": Change(AxisSwap(0, num_heads, half, 2, 1))
        for name, num_heads in heads.items()
        for kind in ("weight", "bias")
    }


def read_floats(shapes: Shapes, floats: Floats | None, name: str, length: int) -> list[float]:
    """Read a vector of the file."""
    if floats is None:
        raise UnsupportedModel(f"the tensor {name} is part of the configuration, and cannot be read here", field=name)
    if shapes.get(name) != (length,):
        raise CheckpointError(f"the tensor {name} must have {length} values, got {shapes.get(name)}", field=name)
    return floats(name)


def read_rope(metadata: Metadata, reads: Collection[str] = ()) -> Config:
    """Read the rotation as `rope_parameters`."""
    rope: Config = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    kind = metadata.text("rope.scaling.type", "linear" if metadata.has("rope.scale_linear") else "none")
    if kind == "linear":
        older = metadata.number("rope.scale_linear", 1.0)
        return rope | {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", older)}
    if kind == "yarn":
        rope |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
        names = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        rope |= {field: metadata.number(name) for field, name in names.items() if metadata.has(name)}
        context = metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))
        return rope | {"original_max_position_embeddings": context}
    if "rope.scaling.type" not in reads:
        metadata.require("rope.scaling.type", "none", "linear", "yarn")
    return rope


def _read_llama3(metadata: Metadata, shapes: Shapes, head_dim: int, floats: Floats | None) -> Config:
    """Return the scaling of Llama 3 that results in the file's factors of wavelengths; empty if the file has none."""
    if FREQUENCY_FACTORS not in shapes:
        return {}
    factors = read_floats(shapes, floats, FREQUENCY_FACTORS, head_dim // 2)
    theta, factor = metadata.number("rope.freq_base", 10_000.0), max(factors)
    if theta < 1 or not all(0.99 < value < math.inf for value in factors):
        raise _unknown_factors()
    turns = [LLAMA3_CONTEXT / (2 * math.pi) * theta ** (-2 * idx / head_dim) for idx in range(head_dim // 2)]
    for low, high in LLAMA3_FACTORS:
        smooth = [min(1.0, max(0.0, (turn - low) / max(high - low, 1e-9))) for turn in turns]
        expected = [1 / ((1 - share) / factor + share) for share in smooth]
        if all(math.isclose(actual, other, rel_tol=1e-3) for actual, other in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": LLAMA3_CONTEXT,
            }
    raise _unknown_factors()


def _unknown_factors() -> UnsupportedModel:
    return UnsupportedModel(
        f"the tensor {FREQUENCY_FACTORS} holds the factors of no known scaling of rotations", field=FREQUENCY_FACTORS
    )
