"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, without their vision encoders."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Final

from quire.models.families.expert_layout import LINEAR_EXPERTS, ROW_EXPERTS
from quire.models.families.hf_config import HFConfig, read_sections, text_config
from quire.models.families.llama_layout import renamed_sources
from quire.models.families.qwen2 import qwen2
from quire.models.families.qwen3 import qwen3
from quire.models.families.qwen3_moe import ExpertStorage, qwen3_moe
from quire.models.specs.spec import ImageRows, ModelSpec, WeightMap

TIED: Final = "tie_word_embeddings"
# Where a file states none, as in transformers.
QWEN2_SECTIONS: Final = (16, 24, 24)
QWEN3_SECTIONS: Final = (24, 20, 20)


def qwen2_vl(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen2VLForConditionalGeneration` or a `Qwen2_5_VLForConditionalGeneration`.

    Most checkpoints have the fields of the language model beside those of the whole, others in `text_config`; its
    tensors have no prefix of their own.
    """
    text = config.part("text_config") or config
    spec, names = qwen2(text.changed({TIED: config.flag(TIED, False) or text.flag(TIED, False)}))
    return replace(spec, image_rows=ImageRows(read_sections(text, QWEN2_SECTIONS, interleaved=False))), names


def qwen3_vl(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3VLForConditionalGeneration`."""
    return _with_images(config, qwen3(_read_text(config)))


def qwen3_vl_moe(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3VLMoeForConditionalGeneration`; scores of experts are divided by their sum, whatever it states."""
    text = _read_text(config).changed({"norm_topk_prob": True})
    storage: ExpertStorage = "rows" if config.flag(ROW_EXPERTS, False) else "columns"
    return _with_images(config, qwen3_moe(text, "linear" if config.flag(LINEAR_EXPERTS, False) else storage))


def _read_text(config: HFConfig) -> HFConfig:
    """Return the configuration of the language model, whose head is tied if the outer object says so."""
    text = text_config(config)
    return text.changed({TIED: config.flag(TIED, False)})


def _with_images(config: HFConfig, read: tuple[ModelSpec, WeightMap]) -> tuple[ModelSpec, WeightMap]:
    """Give tensors the prefix of a language model inside of another, and rows of images their positions."""
    spec, names = read
    vision = config.part("vision_config") or HFConfig({})
    num_deepstack = len(vision.indices("deepstack_visual_indexes"))
    rows = ImageRows(read_sections(text_config(config), QWEN3_SECTIONS, interleaved=True), num_deepstack)
    return replace(spec, image_rows=rows), renamed_sources(names, partial(re.sub, r"^model\.", "model.language_model."))
