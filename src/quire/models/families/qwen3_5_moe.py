"""Qwen3.5 with experts (text): experts and a shared expert in place of every gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.expert_layout import LINEAR_EXPERTS, read_counts, with_experts
from quire.models.families.hf_config import HFConfig, read_sections, text_config
from quire.models.families.llama_layout import map_modules
from quire.models.families.qwen3_5 import SECTIONS, qwen3_5
from quire.models.specs.spec import Experts, ImageRows, ModelSpec, WeightMap

# Values of fields that checkpoints leave out, if they differ from Qwen3.5's.
DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
SHARED: Final = {
    "ffn.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "ffn.shared.down": ("mlp.shared_expert.down_proj",),
    "ffn.shared.gate": ("mlp.shared_expert_gate",),
}


def qwen3_5_moe(config: HFConfig, prefix: str = "model") -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3_5MoeForCausalLM` whose tensors have a prefix; for errors, see `build`."""
    config = config.filled(DEFAULTS)
    config.require("norm_topk_prob", None, True)
    config.require("decoder_sparse_step", None, 1)
    config.require("mlp_only_layers", None, [])
    experts = Experts(
        *read_counts(config),
        config.integer("moe_intermediate_size"),
        renormalised=True,
        shared_width=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    spec, names = with_experts(
        # A head for multi-token prediction is supported without experts only.
        qwen3_5(
            config.changed({"num_experts": 0, "intermediate_size": experts.width, "mtp_num_hidden_layers": 0}), prefix
        ),
        experts,
        range(config.integer("num_hidden_layers")),
        "mlp",
        prefix=prefix,
        is_stacked=not config.flag(LINEAR_EXPERTS, False),
    )
    for idx in range(len(spec.layers)):
        names |= map_modules(f"layers.{idx}", f"{prefix}.layers.{idx}", SHARED)
    return spec, names


def qwen3_5_moe_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Qwen3_5MoeForConditionalGeneration`, without the vision encoder."""
    text = text_config(config)
    # Fields of the outer object.
    whole = {name: config.flag(name, False) for name in ("tie_word_embeddings", LINEAR_EXPERTS)}
    spec, names = qwen3_5_moe(text.changed(whole), "model.language_model")
    return replace(spec, image_rows=ImageRows(read_sections(text, SECTIONS, interleaved=True))), names
