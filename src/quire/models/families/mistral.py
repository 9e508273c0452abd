"""Mistral: Llama without biases, at first with a window in every layer; from Ministral 3 on with a temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import UnsupportedModel, shown
from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, refuse_layer_types, text_config
from quire.models.families.llama_layout import read_llama_layout, renamed_sources
from quire.models.specs.rotations import Temperature
from quire.models.specs.spec import Attention, ModelSpec, WeightMap

# Values of fields that checkpoints of Ministral 3 may leave out.
MINISTRAL3: Final[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None}


def mistral(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `MistralForCausalLM`."""
    window = config.integer_or_none("sliding_window", 4096)
    refuse_layer_types(config, FULL if window is None else WINDOWED)
    return read_llama_layout(config, windows=(window,) * config.integer("num_hidden_layers"))


def ministral3(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Ministral3ForCausalLM`: Mistral with a temperature of queries, by the original length of contexts."""
    spec, names = mistral(config.filled(MINISTRAL3))
    rope = config.part("rope_parameters") or config.part("rope_scaling")
    if rope is None or not rope.has("llama_4_scaling_beta"):
        return spec, names
    interval = float(rope.integer("original_max_position_embeddings"))
    temperature = Temperature(interval, rope.number("llama_4_scaling_beta"), offset=0)
    layers = [
        replace(layer, mixer=replace(layer.mixer, temperature=temperature))
        for layer in spec.layers
        if isinstance(layer.mixer, Attention)
    ]
    return replace(spec, layers=tuple(layers)), names


def mistral3_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Mistral3ForConditionalGeneration`, without the vision encoder."""
    text = text_config(config)
    kind = text.text("model_type", "mistral")
    if kind not in TEXT_MODELS:
        raise UnsupportedModel(
            f"config.json: text_config.model_type is {shown(kind)}, but only "
            f"{' and '.join(map(repr, TEXT_MODELS))} are implemented",
            field="model_type",
        )
    spec, names = TEXT_MODELS[kind](text.filled({"tie_word_embeddings": config.flag("tie_word_embeddings", False)}))
    return spec, renamed_sources(names, "language_model.".__add__)


# Kind of the language model of a `Mistral3ForConditionalGeneration` -> reader of its configuration.
TEXT_MODELS: Final = {"mistral": mistral, "ministral3": ministral3}
