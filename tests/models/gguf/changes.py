"""The changes of weights by a converter to GGUF, for each architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from gguf import MODEL_ARCH
from torch import Tensor

from quire.models.families.gpt2 import COLUMNS

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]


def stack_experts(tensors: Tensors) -> Tensors:
    """Join the experts of a layer, each by itself in the checkpoint, in one tensor [X, out, in]."""
    stacks: dict[str, dict[int, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"model\.(layers\.\d+\.)(?:mlp|feed_forward|block_sparse_moe)\.experts\.(\d+)\.(.+)", name)
        if match is None:
            others[name] = values
            continue
        module = "feed_forward" if match[3].startswith("w") else "mlp"
        prefix = "" if module == "feed_forward" else "model."
        stacks.setdefault(f"{prefix}{match[1]}{module}.experts.{match[3]}", {})[int(match[2])] = values
    return others | {name: torch.stack([stack[idx] for idx in range(len(stack))]) for name, stack in stacks.items()}


def _pair_rows(tensors: Tensors, config: Config) -> Tensors:
    """Let the rows of the two halves of each query and key head take turns."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    changed = dict(tensors)
    for name, values in tensors.items():
        for module, count in heads.items():
            if f".{module}." in name:
                halves = values.reshape(count, 2, -1, *values.shape[1:])
                changed[name] = halves.transpose(1, 2).reshape(values.shape)
    return changed


def _add_one(tensors: Tensors, _config: Config) -> Tensors:
    """Add one to the weights of norms."""
    return {name: values + 1 if name.endswith("norm.weight") else values for name, values in tensors.items()}


def _name_choice_biases(tensors: Tensors, _config: Config) -> Tensors:
    return {name.replace("correction_bias", "correction.bias"): values for name, values in tensors.items()}


def _lfm2(tensors: Tensors, _config: Config) -> Tensors:
    return {
        name.replace("expert_bias", "expert_bias.bias"): values.squeeze(1) if "conv.conv.weight" in name else values
        for name, values in tensors.items()
    }


def _gemma3n(tensors: Tensors, config: Config) -> Tensors:
    """Stack the projections of hidden states, and give scales an ending."""
    changed = {f"{name}.weight" if name.endswith("_scale") else name: values for name, values in tensors.items()}
    for module in ("altup_projections", "altup_unembed_projections"):
        parts = [changed.pop(f"model.{module}.{idx}.weight") for idx in range(config["altup_num_inputs"] - 1)]
        changed[f"model.{module}.weight"] = torch.stack(parts)
    return changed


def _gemma4(tensors: Tensors, _config: Config) -> Tensors:
    """Give weights without an ending the names that they have in files."""
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    endless = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    changed: dict[str, Tensor] = {}
    for name, values in tensors.items():
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        stored = f"{name}.weight" if name.endswith(endless) else name
        changed[f"blk.{layer}.{scales[inner]}" if inner in scales else stored] = values
    return changed


# The head for multi-token prediction is a block behind the last layer.
MTP_NAMES: Final = {
    "mtp.layers.0.": "model.layers.{}.",
    "mtp.fc.": "blk.{}.nextn.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "blk.{}.nextn.enorm.",
    "mtp.pre_fc_norm_hidden.": "blk.{}.nextn.hnorm.",
    "mtp.norm.": "blk.{}.nextn.shared_head_norm.",
}


def _mtp_name(name: str, num_layers: int) -> str:
    for prefix, stored in MTP_NAMES.items():
        if name.startswith(prefix):
            return stored.format(num_layers) + name.removeprefix(prefix)
    return name


def _tile_value_heads(tensors: Tensors, config: Config) -> Tensors:
    """Tile value heads over the key heads, and make the other changes of delta nets."""
    num_key_heads, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    num_rows = 2 * num_key_heads * config["linear_key_head_dim"]

    def tiled(values: Tensor, width: int) -> Tensor:
        heads = values.reshape(num_key_heads, -1, width, *values.shape[1:])
        return heads.transpose(0, 1).reshape(values.shape)

    def tiled_end(values: Tensor) -> Tensor:
        return torch.cat([values[:num_rows], tiled(values[num_rows:], dim)])

    changed = {}
    for stored_name, values in tensors.items():
        name = _mtp_name(stored_name, config["num_hidden_layers"])
        part = name.rpartition("linear_attn.")[2]
        if part.startswith("in_proj_qkv"):
            values = tiled_end(values)
        elif part.startswith("conv1d"):
            values = tiled_end(values.squeeze(1))
        elif part.startswith("in_proj_z"):
            values = tiled(values, dim)
        elif part.startswith(("in_proj_a", "in_proj_b", "dt_bias")):
            values = tiled(values, 1)
        elif part == "A_log":
            values = tiled(-values.exp(), 1)
        elif part.startswith("out_proj"):
            values = tiled(values.T, dim).T
        elif name.endswith("norm.weight") and part != "norm.weight":
            values = values + 1
        changed[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return changed


def _qwen3_next(tensors: Tensors, config: Config) -> Tensors:
    """Divide the first projection of delta nets, which has the rows of a key head together."""
    num_key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // num_key_heads * config["linear_value_head_dim"]
    ends = key_dim, 2 * key_dim, 2 * key_dim + values
    changed: dict[str, Tensor] = {}
    for stored_name, stored in tensors.items():
        name, values_of = stored_name.replace(".dt_bias", ".dt_proj.bias"), stored
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if part == "linear_attn.in_proj_qkvz.weight":
            heads = stored.view(num_key_heads, -1, stored.shape[1]).tensor_split(ends, 1)
            *qkv, gates = (each.flatten(0, 1) for each in heads)
            changed |= {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv), f"blk.{layer}.attn_gate.weight": gates}
            continue
        if part == "linear_attn.conv1d.weight":
            values_of = stored.squeeze(1)
        elif part == "linear_attn.A_log":
            values_of = -stored.exp()
        elif part == "mlp.shared_expert_gate.weight":
            values_of = stored.squeeze(0)
        elif name.endswith("norm.weight") and part != "linear_attn.norm.weight":
            values_of = stored + 1
        changed[name] = values_of
    return changed


def _squeeze_shared_gates(tensors: Tensors, config: Config) -> Tensors:
    return {
        name: values.squeeze(0) if name.endswith("shared_expert_gate.weight") else values
        for name, values in _tile_value_heads(tensors, config).items()
    }


def _mamba(tensors: Tensors, config: Config, module: str = "mamba", groups: str = "mamba_n_groups") -> Tensors:
    """Give the vectors of recurrent layers two dimensions."""
    changed = {}
    for name, values in tensors.items():
        part = name.rpartition(f"{module}.")[2]
        if part == "conv1d.weight":
            values = values.squeeze(1)
        elif part == "A_log":
            values = -values.exp()[:, None]
        elif part == "D":
            values = values[:, None]
        elif part == "norm.weight":
            values = values.reshape(config[groups], -1)
        changed[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return changed


def _nemotron_h(tensors: Tensors, config: Config) -> Tensors:
    """Make the changes of recurrent layers, and name experts as other families do, which are then stacked."""
    changed = _name_choice_biases(_mamba(tensors, config, "mixer", "n_groups"), config)
    experts = "backbone.", "model.", ".mixer.experts", ".mlp.experts"
    return {
        name.replace(*experts[:2]).replace(*experts[2:]) if experts[2] in name else name: values
        for name, values in changed.items()
    }


def _granite(tensors: Tensors, config: Config) -> Tensors:
    """Split the fused gate and up projections, and make the changes of attention and recurrent layers."""
    changed: dict[str, Tensor] = {}
    suffixes = {"shared_mlp": "_shexp" if config["num_local_experts"] else "", "block_sparse_moe": "_exps"}
    for name, values in _pair_rows(_mamba(tensors, config), config).items():
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        module, _, part = inner.partition(".")
        if part == "input_linear.weight":
            gate, up = values.chunk(2, dim=-2)
            changed[f"blk.{layer}.ffn_gate{suffixes[module]}.weight"] = gate
            changed[f"blk.{layer}.ffn_up{suffixes[module]}.weight"] = up
        elif part == "output_linear.weight":
            changed[f"blk.{layer}.ffn_down{suffixes[module]}.weight"] = values
        else:
            changed[name] = values
    return changed


def _divide_experts(tensors: Tensors, _config: Config) -> Tensors:
    """Make linear layers of experts that are stored as [X, in, out], gate and up in one."""
    changed: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = values.transpose(1, 2).chunk(2, dim=1)
            prefix = name.removesuffix("gate_up_proj")
            changed |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            changed[f"{name}.weight"] = values.transpose(1, 2)
        else:
            changed[name] = values
    return changed


def _gpt_oss(tensors: Tensors, _config: Config) -> Tensors:
    """Make linear layers of experts that are stored as [X, in, out], with gates and ups that alternate."""
    changed: dict[str, Tensor] = {}
    for name, values in tensors.items():
        prefix, _, part = name.partition(".experts.")
        names = [f"{prefix}.experts.{each}_proj" for each in ("gate", "up", "down")]
        if part == "gate_up_proj":
            changed |= {f"{names[idx]}.weight": values[..., idx::2].mT for idx in (0, 1)}
        elif part == "gate_up_proj_bias":
            changed |= {f"{names[idx]}.bias": values[..., idx::2] for idx in (0, 1)}
        elif part == "down_proj":
            changed[f"{names[2]}.weight"] = values.mT
        elif part == "down_proj_bias":
            changed[f"{names[2]}.bias"] = values
        else:
            changed[f"{name}.weight" if name.endswith("sinks") else name] = values
    return changed


def _gpt2(tensors: Tensors, _config: Config) -> Tensors:
    """Transpose the matrices that are stored by columns."""
    return {name: values.T if name.endswith(COLUMNS) else values for name, values in tensors.items()}


def _falcon_h1(tensors: Tensors, config: Config) -> Tensors:
    """Multiply weights by the multipliers of the configuration."""
    attention_in = config["attention_in_multiplier"]
    factors = {
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "q_proj": attention_in,
        "k_proj": attention_in * config["key_multiplier"],
        "v_proj": attention_in,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    inner = config["mamba_d_ssm"] or config["hidden_size"] * config["mamba_expand"]
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    widths = [inner, inner, groups, groups, config["mamba_n_heads"]]
    parts = torch.repeat_interleave(torch.tensor(config["ssm_multipliers"]), torch.tensor(widths))
    changed = {}
    for name, values in tensors.items():
        module = name.split(".")[-2]
        if module == "in_proj":
            scale = parts * config["ssm_in_multiplier"]
            changed[name] = values * (scale[:, None] if values.dim() == 2 else scale)
        else:
            changed[name] = values * factors.get(module, 1.0)
    return _mamba(changed, config)


CHANGES: Final[dict[MODEL_ARCH, Callable[[Tensors, Config], Tensors]]] = {
    MODEL_ARCH.LLAMA: _pair_rows,
    MODEL_ARCH.MISTRAL3: _pair_rows,
    MODEL_ARCH.SMOLLM3: _pair_rows,
    MODEL_ARCH.GEMMA: _add_one,
    MODEL_ARCH.MINIMAXM2: _name_choice_biases,
    MODEL_ARCH.GLM4_MOE: _name_choice_biases,
    MODEL_ARCH.LLAMA4: _divide_experts,
    MODEL_ARCH.GPT_OSS: _gpt_oss,
    MODEL_ARCH.GEMMA2: _add_one,
    MODEL_ARCH.GEMMA3: _add_one,
    MODEL_ARCH.GEMMA3N: _gemma3n,
    MODEL_ARCH.GEMMA4: _gemma4,
    MODEL_ARCH.QWEN3NEXT: _qwen3_next,
    MODEL_ARCH.QWEN35: _tile_value_heads,
    MODEL_ARCH.QWEN35MOE: _squeeze_shared_gates,
    MODEL_ARCH.LFM2: _lfm2,
    MODEL_ARCH.LFM2MOE: _lfm2,
    MODEL_ARCH.GRANITE: _granite,
    MODEL_ARCH.GRANITE_MOE: _granite,
    MODEL_ARCH.GRANITE_HYBRID: _granite,
    MODEL_ARCH.FALCON_H1: _falcon_h1,
    MODEL_ARCH.GPT2: _gpt2,
    **dict.fromkeys((MODEL_ARCH.NEMOTRON_H, MODEL_ARCH.NEMOTRON_H_MOE), _nemotron_h),
}
