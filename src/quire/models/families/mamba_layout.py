"""Layers of Mamba 2 in Bamba's layout: their fields and the names of their tensors."""

from __future__ import annotations

import math
from typing import Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import map_modules
from quire.models.specs.spec import Mamba2, RMSNorm, WeightMap

# Values of `time_step_limit` without limits.
NO_LIMITS: Final = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, "inf"])
HEADS: Final = {"A_log": "A_log", "dt_bias": "dt_bias", "D": "D"}


def read_mamba2(config: HFConfig, inner: int, norm: RMSNorm | None) -> Mamba2:
    """Read the heads of a recurrent layer, whose projections have no biases unless `mamba_proj_bias` is set."""
    config.require("hidden_act", "silu")
    config.require("time_step_limit", *NO_LIMITS)
    num_heads, num_groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    head_dim = inner // num_heads
    config.require("mamba_d_head", "auto", head_dim)
    if head_dim * num_heads != inner or num_heads % num_groups:
        raise CheckpointError(
            f"config.json: mamba_n_heads must divide {inner}, the values of all heads, and be a multiple of "
            f"mamba_n_groups ({num_groups}), got {num_heads}",
            field="mamba_n_heads",
        )
    has_bias = config.flag("mamba_proj_bias", False)
    return Mamba2(
        num_heads,
        head_dim,
        num_groups,
        config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4, least=2),
        norm,
        conv_bias=config.flag("mamba_conv_bias", True),
        input_bias=has_bias,
        output_bias=has_bias,
    )


def map_mamba2(ours: str, theirs: str, mamba: Mamba2) -> WeightMap:
    """Name the tensors of a recurrent layer."""
    names = map_modules(ours, theirs, {"input": ("in_proj",)}, has_bias=mamba.input_bias)
    names |= map_modules(ours, theirs, {"conv": ("conv1d",)}, has_bias=mamba.conv_bias)
    names |= map_modules(ours, theirs, {"output": ("out_proj",)}, has_bias=mamba.output_bias)
    names |= {f"{ours}.{name}": (f"{theirs}.{tensor}",) for name, tensor in HEADS.items()}
    if mamba.norm is not None:
        names[f"{ours}.norm.weight"] = (f"{theirs}.norm.weight",)
    return names
