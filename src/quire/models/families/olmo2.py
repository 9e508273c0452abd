"""OLMo 2 and 3: norms after each half of a layer, and of all query and all key heads; OLMo 3 has windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, read_rope, read_rope_part, read_windows
from quire.models.families.llama_layout import map_weights, read_llama_layout
from quire.models.specs.rotations import Rope
from quire.models.specs.spec import Attention, LayerSpec, ModelSpec, RMSNorm, WeightMap

NORMS: Final[Mapping[str, str]] = {
    "mixer.output.norm": "post_attention_layernorm",
    "ffn.down.norm": "post_feedforward_layernorm",
}


def olmo2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read an `Olmo2ForCausalLM`.

    Source: arXiv 2501.00656.
    """
    return _read(config)


def olmo3(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read an `Olmo3ForCausalLM`, with a window in three layers of four; a scaling is for the others."""
    config = config.filled({"rope_theta": 5e5, "sliding_window": 4096})
    windows = read_windows(config, lambda idx: (idx + 1) % 4 != 0)
    rope, window_rope = _read_ropes(config)
    spec, names = _read(config, rope, windows)
    layers = tuple(_with_window_rope(layer, window_rope) for layer in spec.layers)
    return replace(spec, layers=layers), names


def _read(
    config: HFConfig, rope: Rope | None = None, windows: Sequence[int | None] | None = None
) -> tuple[ModelSpec, WeightMap]:
    config = config.filled({"rms_norm_eps": 1e-5})
    has_bias = config.flag("attention_bias", False)
    spec, _ = read_llama_layout(
        config, qkv_bias=has_bias, output_bias=has_bias, qk_norm="joint", windows=windows, rope=rope
    )
    norm = RMSNorm(spec.norm.eps, wide=True)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        layers.append(replace(layer, norm=None, post_norm=norm, mixer=replace(layer.mixer, qk_norm=norm)))
    spec = replace(spec, layers=tuple(layers), norm=norm)
    return spec, map_weights(spec, NORMS)


def _read_ropes(config: HFConfig) -> tuple[Rope, Rope]:
    """Return the rotation of layers with full attention, and that of layers with a window."""
    theta, parts = config.number("rope_theta"), config.part("rope_parameters")
    if parts is None:
        return read_rope(config), Rope(theta)
    parts.require("rope_type", None)
    full, windowed = (read_rope_part(config, parts.part(kind), theta) for kind in (FULL, WINDOWED))
    return full, windowed


def _with_window_rope(layer: LayerSpec, rope: Rope) -> LayerSpec:
    if not isinstance(layer.mixer, Attention) or layer.mixer.window is None:
        return layer
    return replace(layer, mixer=replace(layer.mixer, rope=rope))
