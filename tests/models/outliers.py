"""Tiny random checkpoints whose activations have outliers like those of real models.

Some channels of the norms before projections of queries, keys and values, and of gates, are 20 times the others, and
so are some rows of up projections, whose products are inputs of down projections. The columns that multiply these
channels are smaller by as much: the function is that of a model without outliers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.stored_tensors import stored_tensors
from tests.models.tiny import CASES, SHAPE
from tests.ops.outliers import EVERY, OUTLIER

# Whole blocks of K-quants in every row, and all experts chosen, so that rounding does not decide which.
WIDER: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 512}
ALL_EXPERTS: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
}
# Norms whose results go into projections; Gemma's second one is behind its attention.
NORMS: Final = ("input_layernorm.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight")
BEHIND_NORMS: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "router.weight")
BEHIND_NORMS_AND_UP: Final = ("up_proj.weight", "gate_up_proj")
DOWN: Final = ("down_proj.weight", "down_proj")


def make_model(name: str) -> PreTrainedModel:
    """Return the model of a case of `tests.models.tiny`, wider and with outliers."""
    config_class, model_class, options = CASES[name]
    torch.manual_seed(len(name))
    model: PreTrainedModel = model_class(config_class(**SHAPE | options | WIDER | ALL_EXPERTS.get(name, {}))).eval()
    has_columns_first = name == "gpt-oss"  # [experts, in, out]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                if key.endswith(NORMS) and not (name.startswith("gemma") and "post_attention" in key):
                    parameter[5::EVERY] = OUTLIER - name.startswith("gemma")
                continue
            parameter.normal_(0.0, WIDER["hidden_size"] ** -0.5)
            weight = parameter.transpose(-1, -2) if has_columns_first and parameter.dim() == 3 else parameter
            if key.endswith(BEHIND_NORMS + BEHIND_NORMS_AND_UP + DOWN):
                weight[..., 5::EVERY] /= OUTLIER
            if key.endswith(BEHIND_NORMS_AND_UP):
                weight[..., 5::EVERY, :] *= OUTLIER
    model.config.architectures = [model_class.__name__]
    return model


def save_outliers(name: str, folder: Path, change: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Write the checkpoint of a case with outliers.

    Args:
        name: name in `tests.models.tiny.CASES`.
        folder: folder to make.
        change: tensors to write in place of the model's.
        config: additional fields of the configuration.
    """
    model = make_model(name)
    folder.mkdir(parents=True)
    fields = json.loads(model.config.to_json_string()) | config
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = stored_tensors(model) if change is None else change
    save_file({key: values.contiguous() for key, values in tensors.items()}, folder / "model.safetensors")
    return folder
