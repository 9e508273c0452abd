"""Fields of configurations that apply to some layers only: shapes, shared caches, rotations, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.hf_config import FULL, HFConfig

# Fields of a layer in `per_layer_config`.
OWN_FIELDS: Final = ("head_dim", "num_key_value_heads")


def read_layers(config: HFConfig, kinds: Sequence[str]) -> tuple[HFConfig, ...]:
    """Return each layer's configuration, with the shape of keys and values stated for it or for full attention."""
    overrides = config.parts("per_layer_config")
    if overrides is None:
        shape = {"head_dim": "global_head_dim"}
        if config.flag("attention_k_eq_v", False):
            shape["num_key_value_heads"] = "num_global_key_value_heads"
        full = config.changed({name: config.integer(field) for name, field in shape.items() if config.has(field)})
        return tuple(full if kind == FULL else config for kind in kinds)
    layers = [config] * len(kinds)
    for name, part in overrides.items():
        if not name.isdecimal() or int(name) >= len(kinds):
            raise CheckpointError(
                f"config.json: per_layer_config must name layers from 0 to {len(kinds) - 1}, got {shown(name)}",
                field="per_layer_config",
            )
        unread = next((field for field in part.names() if field not in OWN_FIELDS), None)
        if unread is not None:
            raise UnsupportedModel(
                f"config.json: per_layer_config.{name} states {unread}, but only {' and '.join(OWN_FIELDS)} can be "
                "stated for one layer",
                field="per_layer_config",
            )
        layers[int(name)] = config.changed({field: part.integer(field) for field in part.names()})
    return tuple(layers)


def read_sources(config: HFConfig, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return each layer's source of keys and values: None, or for the last layers the last source of their kind."""
    num_own = len(kinds) - config.count("num_kv_shared_layers", 0)
    last = {kind: idx for idx, kind in enumerate(kinds[: max(0, num_own)])}
    if not last.keys() >= {*kinds}:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers must leave a layer of each kind out of {len(kinds)} layers, got "
            f"{config.count('num_kv_shared_layers', 0)}",
            field="num_kv_shared_layers",
        )
    return tuple(None if idx < num_own else last[kind] for idx, kind in enumerate(kinds))


def read_turned(config: HFConfig) -> tuple[bool, ...]:
    """Return whether each layer rotates queries and keys: by `no_rope_layers`, or all layers but every n-th."""
    num_layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    stated = config.flags("no_rope_layers") or tuple((idx + 1) % interval > 0 for idx in range(num_layers))
    if len(stated) < num_layers:
        raise CheckpointError(
            f"config.json: no_rope_layers must have one entry for each of {num_layers} layers, got {len(stated)}",
            field="no_rope_layers",
        )
    return stated[:num_layers]


def read_expert_layers(config: HFConfig) -> frozenset[int]:
    """Return the layers with experts: by `moe_layers`, or every n-th."""
    if config.has("moe_layers"):
        return config.indices("moe_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, config.integer("num_hidden_layers"), step))
