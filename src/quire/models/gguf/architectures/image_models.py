"""Language models of GGUF files that read images: their configuration as a part of the whole model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.models.families.expert_layout import LINEAR_EXPERTS
from quire.models.families.vision_towers import STAND_IN, TOWERS, Tower
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Config

# Value of `general.architecture` -> the whole model, whose encoder is in a file of its own.
WHOLE_MODELS: Final[Mapping[str, str]] = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen3vl": "Qwen3VLForConditionalGeneration",
    "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
}
GEMMA3: Final = "gemma3"
# A file of one of the others has the axes of its frequencies, the last of which is for no model of today.
SECTIONS: Final = "rope.dimension_sections"
SCALING: Final = "rope.scaling.factor"
NUM_DEEPSTACK: Final = "n_deepstack_layers"
TOKENS: Final = "tokenizer.ggml.tokens"
_PREFIXES: Final = ("model.language_model.", "language_model.model.")


def as_whole_model(config: Config, name: str, metadata: Metadata, fields: Mapping[str, Any]) -> Config:
    """Return the configuration of the whole model, or `config` if the model reads no images.

    Args:
        config: configuration of the language model.
        name: value of `general.architecture`.
        metadata: fields of the architecture.
        fields: all fields.
    """
    if name not in WHOLE_MODELS:
        return config
    tower = TOWERS[WHOLE_MODELS[name]]
    stored = fields.get(TOKENS)
    whole = {
        "architectures": [WHOLE_MODELS[name]],
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
        # Gemma 3's models of text do not scale positions.
        **_image_token(tower, stored if isinstance(stored, list) else [], may_stand_in=metadata.has(SCALING)),
    }
    if name == GEMMA3:
        return whole if tower.token_field in whole and config["tie_word_embeddings"] else config
    if not metadata.has(SECTIONS):
        return config
    sections = metadata.sections(SECTIONS)
    rope = config["rope_parameters"] | {"mrope_section": list(sections), "mrope_interleaved": True}
    num_deepstack = metadata.integer(NUM_DEEPSTACK, 0, least=0, most=metadata.num_blocks)
    return whole | {
        "text_config": config | {"rope_parameters": rope},
        # Only the number of these layers is a property of the language model.
        "vision_config": {"deepstack_visual_indexes": list(range(num_deepstack))},
        LINEAR_EXPERTS: config.get(LINEAR_EXPERTS, True),
    }


def _image_token(tower: Tower, tokens: Sequence[object], *, may_stand_in: bool) -> dict[str, Any]:
    """Return the fields with the token of an image in a vocabulary; none if it has no such token.

    Many files of Gemma 3 have the 262,144 tokens of its text models, and lack the token of images, which is the next.
    """
    if tower.token in tokens:
        return {tower.token_field: tokens.index(tower.token)}
    if may_stand_in and tower.stand_in is not None and tower.stand_in in tokens:
        return {tower.token_field: tokens.index(tower.stand_in), STAND_IN: tower.stand_in}
    return {}


def in_language_model(name: str) -> str:
    """Return the name of a tensor of a whole model as one of the language model by itself."""
    prefix = next(filter(name.startswith, _PREFIXES), None)
    return name if prefix is None else f"model.{name.removeprefix(prefix)}"
