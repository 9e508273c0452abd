"""How many parameters a model has, as its `config.json` lets one guess: matrices counted, all else left out."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, NamedTuple

from quire.config import Quantization
from quire.models.cache_layout import (
    RECURRENT,
    SHORT_CONV,
    parts_of,
    read_head_dim,
    read_inner,
    read_kinds,
    text_fields,
)
from quire.models.families.hf_config import HFConfig
from quire.models.families.layer_fields import read_expert_layers, read_layers, read_sources
from quire.models.families.lfm2 import read_mlp_width

# What configurations call the number of experts, and the width of the expert that every token goes through.
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED_WIDTHS: Final = ("shared_expert_intermediate_size", "shared_intermediate_size")


# Bytes of a weight, and of one of the head, its part of the scales included.
ROUNDED_BYTES: Final[Mapping[Quantization, tuple[Fraction, Fraction]]] = {
    "int8": (Fraction(1), Fraction(1)),
    "int4": (Fraction(9, 16), Fraction(13, 16)),
}


class ParameterCounts(NamedTuple):
    """The parameters of the language model; what sees images or hears is not counted.

    Args:
        tables: of what is looked up.
        head: of the output head, which may be one of the tables.
        projections: of all other matrices.
    """

    tables: int
    head: int
    is_tied: bool
    projections: int

    @property
    def total(self) -> int:
        """All of them, those of a tied head once."""
        return self.tables + (0 if self.is_tied else self.head) + self.projections

    def num_bytes(self, element_bytes: int, quantization: Quantization | None) -> int:
        """Return what they take; a head that is rounded is there by itself."""
        if quantization is None:
            return self.total * element_bytes
        body, head = ROUNDED_BYTES[quantization]
        return self.tables * element_bytes + int(self.head * head) + int(self.projections * body)


def estimate_parameters(config: Mapping[str, Any]) -> ParameterCounts:
    """Estimate the parameters of a model.

    Args:
        config: the content of `config.json`.

    Raises:
        CheckpointError: a field that the estimate needs is missing or of the wrong type; the message names it.
        UnsupportedModel: the layers are of a kind that is not known.
    """
    fields = text_fields(config)
    width, vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size")
    is_tied = fields.flag("tie_word_embeddings", config.get("tie_word_embeddings") is True)
    kinds = read_kinds(config)
    table, total = _per_layer_inputs(fields, width, len(kinds))
    layers = zip(kinds, read_layers(fields, kinds), read_sources(fields, kinds), strict=True)
    for idx, (kind, layer, source) in enumerate(layers):
        is_shared = source is not None
        total += sum(_mixer(part, layer, width, is_shared) for part in parts_of(kind))
        total += _ffn(idx, layer, width, is_shared)
    return ParameterCounts(vocab_size * width + table, vocab_size * width, is_tied, total)


def _per_layer_inputs(fields: HFConfig, width: int, num_layers: int) -> tuple[int, int]:
    """Return the parameters of what each layer is told of a token: a table; a projection, and two in every layer."""
    told = num_layers * fields.count("hidden_size_per_layer_input", 0)
    return (told * fields.integer("vocab_size_per_layer_input"), told * 3 * width) if told else (0, 0)


def _mixer(kind: str, fields: HFConfig, width: int, is_shared: bool) -> int:
    if kind == SHORT_CONV:
        return 4 * width * width
    if kind == RECURRENT:
        return _mamba(fields, width) if fields.has("mamba_d_state") else _delta_net(fields, width)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = 0 if is_shared else fields.integer("num_key_value_heads", num_heads)
    # An output gate is as large as the queries.
    num_query_parts = 2 if fields.flag("attn_output_gate", fields.has("full_attention_interval")) else 1
    return width * read_head_dim(fields) * ((1 + num_query_parts) * num_heads + 2 * num_kv_heads)


def _delta_net(fields: HFConfig, width: int) -> int:
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    num_values = fields.integer("linear_num_value_heads")
    values = num_values * fields.integer("linear_value_head_dim")
    # Queries, keys, values and an output gate; two gates of each head; the output.
    return width * (2 * keys + 2 * values + 2 * num_values) + values * width


def _mamba(fields: HFConfig, width: int) -> int:
    inner, state = read_inner(fields), fields.integer("mamba_d_state")
    if fields.has("mamba_n_heads"):
        projections = 2 * fields.integer("mamba_n_groups") * state
        return width * (2 * inner + projections + fields.integer("mamba_n_heads")) + inner * width
    rank = -(-width // 16)
    return width * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * state + inner * width


def _ffn(idx: int, fields: HFConfig, width: int, is_shared: bool) -> int:
    """Return the parameters of a layer's gated MLP, or of its experts, their router and the shared expert."""
    num_experts, shared = _first_of(EXPERT_COUNTS, fields), _first_of(SHARED_WIDTHS, fields)
    if num_experts == 0 or not _has_experts(idx, fields):
        factor = 2 if is_shared and fields.flag("use_double_wide_mlp", False) else 1
        return 3 * width * factor * ((shared if num_experts == 0 else 0) or _mlp_width(idx, fields))
    own = fields.has("moe_intermediate_size")
    expert = fields.integer("moe_intermediate_size") if own else fields.integer_of("intermediate_size", idx)
    # Where layers without experts have a width of their own, the shared expert is as wide as the others.
    shared = expert if fields.has("intermediate_size_mlp") else shared
    return num_experts * (3 * width * expert + width) + 3 * width * shared


def _first_of(names: tuple[str, ...], fields: HFConfig) -> int:
    return next((fields.count(name, 0) for name in names if fields.has(name)), 0)


def _has_experts(idx: int, fields: HFConfig) -> bool:
    if idx in fields.indices("mlp_only_layers") or idx < fields.count("first_k_dense_replace", 0):
        return False
    if fields.has("interleave_moe_layer_step"):
        return idx in read_expert_layers(fields)
    if fields.has("expert_layer_period"):
        return idx % fields.integer("expert_layer_period") == fields.count("expert_layer_offset", 0)
    return (idx + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _mlp_width(idx: int, fields: HFConfig) -> int:
    """Return the columns of a gate."""
    if fields.has("block_ff_dim") or fields.has("block_auto_adjust_ff_dim"):
        return read_mlp_width(fields)
    return fields.integer_of(
        "intermediate_size_mlp" if fields.has("intermediate_size_mlp") else "intermediate_size", idx
    )
