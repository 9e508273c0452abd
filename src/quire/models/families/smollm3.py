"""SmolLM3: Llama with some layers without rotation."""

from __future__ import annotations

from dataclasses import replace

from quire.models.families.hf_config import FULL, HFConfig, read_windows, refuse_layer_types
from quire.models.families.layer_fields import read_turned
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import Attention, LayerSpec, ModelSpec, WeightMap


def smollm3(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `SmolLM3ForCausalLM`; windows are for layers without rotation."""
    config = config.filled({"tie_word_embeddings": True, "rope_theta": 2e6})
    turned, windows = read_turned(config), None
    if config.flag("use_sliding_window", False) and config.has("sliding_window"):
        windows = read_windows(config, lambda idx: not turned[idx])
    else:
        refuse_layer_types(config, FULL)
    has_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    spec, names = read_llama_layout(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias, windows=windows)
    layers = (layer if turned[idx] else _unturned(layer) for idx, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers)), names


def _unturned(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, rope=None))
