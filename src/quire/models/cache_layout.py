"""Which layers of a model keep what: from a `ModelSpec`, or from a `config.json` that no family reads.

The second way reads the generic fields of Hugging Face's configurations. They are enough to size a cache with, not to
run a model; what could change the size and is not understood is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from quire.config import CacheDtype
from quire.errors import UnsupportedModel, shown
from quire.memory.specs import ChunkedLocal, FullAttention, KVCacheSpec, RecurrentState, SlidingWindow
from quire.models.families.gemma4 import DEFAULTS as GEMMA4
from quire.models.families.hf_config import NEUTRAL, HFConfig
from quire.models.families.layer_fields import read_layers, read_sources, read_turned
from quire.models.families.llama4 import DEFAULTS as LLAMA4
from quire.models.families.qwen3_5 import DEFAULTS as QWEN3_5
from quire.models.spec import KeptState, KeptTokens, ModelSpec

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, SHORT_CONV = "linear_attention", "conv"
# A kind that no configuration lists: two kinds side by side in every layer.
BOTH = "both"
# What configurations call the kinds of layer -> one name for each. Which recurrence it is, other fields tell.
KINDS: Final[Mapping[str, str]] = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOWED,
    "chunked_attention": CHUNKED,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "conv": SHORT_CONV,
}
# `model_type` -> what its checkpoints leave out of their configurations.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "gemma3n_text": {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {**GEMMA4, "sliding_window_pattern": 6, "tie_word_embeddings": True},
    "gemma2": {"sliding_window_pattern": 2, "tie_word_embeddings": True},
    "lfm2": {"tie_word_embeddings": True},
    "llama4_text": LLAMA4,
    "qwen3_5_text": QWEN3_5,
}
# `model_type` of those whose layers all have the window that `sliding_window` names.
ALL_WINDOWED: Final = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
# `model_type` of those whose layers all have attention and a recurrence side by side.
ALL_BOTH: Final = frozenset({"falcon_h1"})
# `model_type` of those whose last layer sees all tokens, whatever is stated.
LAST_IS_FULL: Final = frozenset({"gemma4_text"})
# Fields that change what a token or a sequence costs in ways that are not read here.
UNREAD: Final = (
    "kv_lora_rank",
    "v_head_dim",
    "global_head_dim",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "cross_attention_layers",
    "is_encoder_decoder",
    "hybrid_override_pattern",
)
# `model_type` -> which of these are read all the same, for what they mean there is known.
READ: Final[Mapping[str, frozenset[str]]] = {
    "gemma3n_text": frozenset({"num_kv_shared_layers"}),
    "gemma4_text": frozenset({"global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"}),
}
# Where a field starts like this and nothing says which layers it is for, the layers are not all attention.
RECURRENT_PREFIXES: Final = ("mamba_", "ssm_", "linear_", "conv_", "rwkv_", "lru_")

Layer = TypeVar("Layer")


class AttentionLayer(NamedTuple):
    """What an attention layer keeps of every token.

    Args:
        num_kv_heads, head_dim: the shape of one token's keys.
        window: tokens that a token sees, itself included; None for all before it.
        chunk: tokens of the chunk that a token sees no further than; None for no chunks.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None


class StateLayer(NamedTuple):
    """What a recurrent layer keeps of a sequence.

    Args:
        num_inputs: values of the last inputs of its convolution, in the dtype of the weights.
        state_bytes: of the sum over all tokens, in a dtype of its own.
    """

    num_inputs: int
    state_bytes: int

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a layer, for inputs of `element_bytes` each.

        Whole words of four bytes: however many layers and blocks lie before one, its sums can be read as float32.
        """
        return -(-(self.state_bytes + self.num_inputs * element_bytes) // 4) * 4


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layers of a model that keep something, whatever the block size and dtype.

    Args:
        attention: each kind of attention layer, and how many there are, in the order of their first layers.
        states: the same of recurrent layers.
        max_position: the longest context that the model was made for, in tokens.
    """

    attention: tuple[tuple[AttentionLayer, int], ...]
    states: tuple[tuple[StateLayer, int], ...]
    max_position: int

    def specs(self, block_size: int, dtype: CacheDtype, input_bytes: int) -> tuple[KVCacheSpec, ...]:
        """Return one cache spec for each kind of layer, those of attention first.

        Args:
            block_size: N.
            dtype: of keys and values.
            input_bytes: bytes of one input that a recurrent layer keeps: of a value in the dtype of the weights.
        """
        states = (
            RecurrentState(block_size=block_size, num_layers=count, layer_bytes=layer.num_bytes(input_bytes))
            for layer, count in self.states
        )
        return (*(_spec(layer, count, block_size, dtype) for layer, count in self.attention), *states)


def layout_of(spec: ModelSpec) -> CacheLayout:
    """Return what the layers of a model keep that a family has read.

    Raises:
        UnsupportedModel: no layer keeps tokens.
    """
    attention, states = [], []
    for num_layers, kept in spec.cache_groups:
        match kept:
            case KeptTokens():
                attention.append((AttentionLayer(*kept), num_layers))
            case KeptState():
                states.append((layer_of(kept), num_layers))
    return _checked(CacheLayout(tuple(attention), tuple(states), spec.max_position))


def layer_of(kept: KeptState) -> StateLayer:
    """Return what a layer keeps, as sizes."""
    return StateLayer(kept.num_inputs, kept.sum_bytes)


def read_layout(config: Mapping[str, Any]) -> CacheLayout:
    """Read what the layers keep from the generic fields of a configuration.

    Raises:
        CheckpointError: a field is missing or of the wrong type.
        UnsupportedModel: a field changes the size of the cache in a way that is not implemented, or no layer keeps
            tokens.
    """
    fields = text_fields(config)
    _require_generic_fields(config, fields)
    kinds = read_kinds(config)
    whole = zip(kinds, read_layers(fields, kinds), read_sources(fields, kinds), strict=True)
    # A layer that reads another's cache keeps nothing.
    layers = [_read_layer(part, layer) for kind, layer, source in whole if source is None for part in parts_of(kind)]
    attention = _counted(layer for layer in layers if isinstance(layer, AttentionLayer))
    states = _counted(layer for layer in layers if isinstance(layer, StateLayer))
    return _checked(CacheLayout(attention, states, fields.integer("max_position_embeddings")))


def _checked(layout: CacheLayout) -> CacheLayout:
    """Refuse a model whose cache has no blocks of tokens: pools are sized in them."""
    if not layout.attention:
        raise UnsupportedModel(
            "config.json: layer_types has no attention, so there are no blocks to plan", field="layer_types"
        )
    return layout


def _require_generic_fields(config: Mapping[str, Any], fields: HFConfig) -> None:
    """Refuse a configuration that lacks a field which every size depends on; the message names all that it lacks."""
    needed = ["num_hidden_layers", "num_key_value_heads", "max_position_embeddings"]
    if not fields.has("head_dim"):
        needed += ["hidden_size", "num_attention_heads"]
    missing = [name for name in needed if not fields.has(name)]
    if missing:
        raise UnsupportedModel(
            f"no family implements {config.get('architectures')}, and its config.json lacks {', '.join(missing)}, "
            "without which its cache cannot be sized",
            field=missing[0],
        )


def text_fields(config: Mapping[str, Any]) -> HFConfig:
    """Return the fields of the language model, which some configurations keep in a part of their own.

    What only changes how a model computes (`NEUTRAL`) is left out: it has no say in what is kept.
    """
    part = config.get("text_config")
    text = dict(part) if isinstance(part, Mapping) else dict(config)
    defaults = DEFAULTS.get(str(text.get("model_type")), {})
    given = {name: value for name, value in text.items() if value is not None and name not in NEUTRAL}
    return HFConfig({**defaults, **given}, "text_config." if isinstance(part, Mapping) else "")


def read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the kind of every layer, from the embedding upwards.

    Raises:
        CheckpointError: a field is missing or of the wrong type, or there is not one kind for each layer.
        UnsupportedModel: a kind that is not known, or a field that changes the cache in a way that is not read.
    """
    raw = config.get("text_config")
    names = raw if isinstance(raw, Mapping) else config
    read = READ.get(str(names.get("model_type")), frozenset())
    unread = next((name for name in UNREAD if name not in read and (names.get(name) or config.get(name))), None)
    if unread is not None:
        raise UnsupportedModel(f"config.json: what {unread} means for the cache is not implemented", field=unread)
    fields = text_fields(config)
    num_layers = fields.integer("num_hidden_layers")
    field = "layer_types" if fields.has("layer_types") else "layers_block_type"
    stated = fields.texts(field)
    if not stated:
        return _with_last(fields, [_derived_kind(fields, names, idx) for idx in range(num_layers)])
    if len(stated) != num_layers:
        raise UnsupportedModel(f"config.json: {field} names {len(stated)} of {num_layers} layers", field=field)
    unknown = next((kind for kind in stated if kind not in KINDS), None)
    if unknown is not None:
        raise UnsupportedModel(
            f"config.json: {field} names {shown(unknown)}; what is known to keep are {', '.join(KINDS)}", field=field
        )
    return _with_last(fields, [KINDS[kind] for kind in stated])


def _with_last(fields: HFConfig, kinds: list[str]) -> tuple[str, ...]:
    """Return the kinds with that of the last layer mended, where the model has only one for it."""
    return (*kinds[:-1], FULL if fields.text("model_type", "") in LAST_IS_FULL else kinds[-1])


def parts_of(kind: str) -> tuple[str, ...]:
    """Return the kinds that lie side by side in a layer of a kind."""
    return (FULL, RECURRENT) if kind == BOTH else (kind,)


def _derived_kind(fields: HFConfig, names: Mapping[str, Any], idx: int) -> str:
    """Return the kind of a layer where the configuration does not list them."""
    if fields.text("model_type", "") in ALL_BOTH:
        return BOTH
    if fields.has("full_attn_idxs"):
        return FULL if idx in fields.indices("full_attn_idxs") else SHORT_CONV
    if fields.has("attn_layer_indices"):
        return FULL if idx in fields.indices("attn_layer_indices") else RECURRENT
    if fields.has("attn_layer_period"):
        period = fields.integer("attn_layer_period")
        return FULL if idx % period == fields.count("attn_layer_offset", 0) else RECURRENT
    if fields.has("full_attention_interval"):
        return RECURRENT if (idx + 1) % fields.integer("full_attention_interval") else FULL
    recurrent = next((name for name in names if name.startswith(RECURRENT_PREFIXES) and names[name]), None)
    if recurrent is not None:
        raise UnsupportedModel(
            f"config.json has {recurrent}, but lacks layer_types, which would say for which layers", field="layer_types"
        )
    if fields.has("attention_chunk_size"):
        return CHUNKED if read_turned(fields)[idx] else FULL
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        return WINDOWED if _has_window(fields, idx) else FULL
    return FULL


def _has_window(fields: HFConfig, idx: int) -> bool:
    if fields.has("sliding_window_pattern"):
        return (idx + 1) % fields.integer("sliding_window_pattern") != 0
    if fields.has("max_window_layers"):
        return idx >= fields.count("max_window_layers", 0)
    if fields.text("model_type", "") in ALL_WINDOWED:
        return True
    raise UnsupportedModel(
        "config.json has sliding_window, but lacks layer_types, which would say for which layers", field="layer_types"
    )


def _read_layer(kind: str, fields: HFConfig) -> AttentionLayer | StateLayer:
    if kind == RECURRENT:
        if fields.has("mamba_d_state"):
            return _read_mamba2(fields) if fields.has("mamba_n_heads") else _read_mamba(fields)
        return _read_delta_net(fields)
    if kind == SHORT_CONV:
        return StateLayer(fields.integer("hidden_size") * (fields.integer("conv_L_cache") - 1), 0)
    num_kv_heads, head_dim = fields.integer("num_key_value_heads"), read_head_dim(fields)
    if kind == WINDOWED:
        return AttentionLayer(num_kv_heads, head_dim, window=fields.integer("sliding_window"))
    if kind == CHUNKED:
        return AttentionLayer(num_kv_heads, head_dim, chunk=fields.integer("attention_chunk_size"))
    return AttentionLayer(num_kv_heads, head_dim)


def read_head_dim(fields: HFConfig) -> int:
    """Read the values of a head; where they are not given, the heads share the width."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def read_inner(fields: HFConfig) -> int:
    """Read the inner values of a Mamba layer; where they are not given, they are a multiple of the width."""
    if fields.has("mamba_d_ssm"):
        return fields.integer("mamba_d_ssm")
    return fields.integer("hidden_size") * fields.integer("mamba_expand")


def _read_delta_net(fields: HFConfig) -> StateLayer:
    """Read a gated delta net: inputs of queries, keys and values, and one matrix for each value head."""
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    num_inputs = (2 * keys * key_dim + values * value_dim) * (fields.integer("linear_conv_kernel_dim") - 1)
    return StateLayer(num_inputs, values * key_dim * value_dim * _state_element_bytes(fields))


def _read_mamba(fields: HFConfig) -> StateLayer:
    """Read a Mamba layer: its inner inputs, and a row of states for each."""
    inner = read_inner(fields)
    num_inputs = inner * (fields.integer("mamba_d_conv") - 1)
    return StateLayer(num_inputs, inner * fields.integer("mamba_d_state") * _state_element_bytes(fields))


def _read_mamba2(fields: HFConfig) -> StateLayer:
    """Read a Mamba 2 layer: inputs of the heads and of both projections of each group, and a matrix for each head."""
    inner = read_inner(fields)
    state = fields.integer("mamba_d_state")
    num_inputs = (inner + 2 * fields.integer("mamba_n_groups") * state) * (fields.integer("mamba_d_conv") - 1)
    return StateLayer(num_inputs, inner * state * _state_element_bytes(fields))


def _state_element_bytes(fields: HFConfig) -> int:
    """Return the bytes of one value of a state: float32 unless stated, since rounding would add up over all tokens."""
    return 4 if fields.text("mamba_ssm_dtype", "float32") == "float32" else 2


def _spec(layer: AttentionLayer, count: int, block_size: int, dtype: CacheDtype) -> KVCacheSpec:
    shape = {
        "block_size": block_size,
        "num_layers": count,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "element_bytes": dtype.element_bytes,
        "scale_bytes": dtype.scale_bytes,
    }
    if layer.window is not None:
        return SlidingWindow(window=layer.window, **shape)
    if layer.chunk is not None:
        return ChunkedLocal(chunk=layer.chunk, **shape)
    return FullAttention(**shape)


def _counted(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Return the different layers, each with how many there are."""
    return tuple(Counter(layers).items())
