"""What checkpoints of a model of transformers have."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a checkpoint has, once each, under the names that it has there: experts may be by themselves."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored: dict[str, torch.Tensor] = revert_weight_conversion(model, parameters | stored_buffers(model))
    return stored


def stored_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a checkpoint has besides parameters."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}
