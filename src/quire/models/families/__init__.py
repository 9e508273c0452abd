"""The model families: one file each, and the table of their architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.bamba import bamba
from quire.models.families.dense_layers import read_dense
from quire.models.families.encoders import find_encoder
from quire.models.families.falcon_h1 import falcon_h1
from quire.models.families.gemma import gemma
from quire.models.families.gemma2 import gemma2
from quire.models.families.gemma3 import gemma3, gemma3_of_text_and_images
from quire.models.families.gemma3n import gemma3n, gemma3n_of_text_and_images
from quire.models.families.gemma4 import gemma4, gemma4_of_text_and_images
from quire.models.families.glm4 import glm, glm4
from quire.models.families.glm4_moe import glm4_moe
from quire.models.families.gpt2 import gpt2
from quire.models.families.gpt_oss import gpt_oss
from quire.models.families.granite import granite, granitemoe, granitemoeshared
from quire.models.families.granitemoehybrid import granitemoehybrid
from quire.models.families.hf_config import HFConfig
from quire.models.families.lfm2 import lfm2, lfm2_moe
from quire.models.families.llama import llama
from quire.models.families.llama4 import llama4, llama4_of_text_and_images
from quire.models.families.minimax_m2 import minimax_m2
from quire.models.families.mistral import ministral3, mistral, mistral3_of_text_and_images
from quire.models.families.mixtral import mixtral
from quire.models.families.nemotron_h import nemotron_h
from quire.models.families.olmo2 import olmo2, olmo3
from quire.models.families.phi3 import phi3
from quire.models.families.qwen2 import qwen2
from quire.models.families.qwen3 import qwen3
from quire.models.families.qwen3_5 import qwen3_5, qwen3_5_of_text_and_images
from quire.models.families.qwen3_5_moe import qwen3_5_moe, qwen3_5_moe_of_text_and_images
from quire.models.families.qwen3_moe import qwen3_moe
from quire.models.families.qwen3_next import qwen3_next
from quire.models.families.qwen_vl import qwen2_vl, qwen3_vl, qwen3_vl_moe
from quire.models.families.score_heads import generating_name, with_score_head
from quire.models.families.seed_oss import seed_oss
from quire.models.families.smollm3 import smollm3
from quire.models.specs.spec import ModelSpec, WeightMap

# Name under "architectures" in a checkpoint's config.json -> reader of the configuration.
FAMILIES: Final[dict[str, Callable[[HFConfig], tuple[ModelSpec, WeightMap]]]] = {
    "BambaForCausalLM": bamba,
    "FalconH1ForCausalLM": falcon_h1,
    "GPT2LMHeadModel": gpt2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_of_text_and_images,
    "Gemma3nForCausalLM": gemma3n,
    "Gemma3nForConditionalGeneration": gemma3n_of_text_and_images,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4_of_text_and_images,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeHybridForCausalLM": granitemoehybrid,
    "GraniteMoeSharedForCausalLM": granitemoeshared,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4_of_text_and_images,
    "LlamaForCausalLM": llama,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Ministral3ForCausalLM": ministral3,
    "Mistral3ForConditionalGeneration": mistral3_of_text_and_images,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "NemotronHForCausalLM": nemotron_h,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen2_vl,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5_of_text_and_images,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_of_text_and_images,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
}


def build(config: Mapping[str, Any]) -> tuple[ModelSpec, WeightMap]:
    """Read the configuration of a decoder.

    Args:
        config: the content of `config.json`.

    Raises:
        UnsupportedModel: no family implements the architecture or a value of a field, or the model is an encoder.
        CheckpointError: a field is missing or of the wrong type.
    """
    encoder = find_encoder(config)
    if encoder is not None:
        raise UnsupportedModel(
            f"the architecture {encoder} is an encoder, which generates no text and has no KV cache: it serves "
            "embeddings, scores and classes",
            field="architectures",
        )
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError("config.json lacks the field architectures", field="architectures")
    name = find_family(config)
    if name is not None:
        fields = HFConfig(config)
        spec, weights = with_score_head(name, fields, *FAMILIES[generating_name(name, config)](fields))
        dense, dense_weights = read_dense(fields)
        return replace(spec, dense=dense), weights | dense_weights
    raise UnsupportedModel(
        f"the architecture {shown(names[0])} is not implemented; docs/checkpoints.md lists those that are",
        field="architectures",
    )


def find_family(config: Mapping[str, Any]) -> str | None:
    """Return the first architecture of a configuration that a family of decoders implements; None without one."""
    names = config.get("architectures")
    texts = (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return next((name for name in texts if generating_name(name, config) in FAMILIES), None)
