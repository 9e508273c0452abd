"""Loading of a decoder of transformers' modules from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.hosted.build import build_module
from quire.models.hosted.choice import one_process_only
from quire.models.hosted.decoder import HostedDecoder
from quire.models.hosted.experts import use_packed_experts
from quire.models.hosted.linear import LayerUse
from quire.models.hosted.rope import fix_length
from quire.models.hosted.weights import fill
from quire.models.specs.hosted_spec import HostedSpec
from quire.ops.interface.ops import Ops


def check_hosted(checkpoint: Checkpoint, *, deterministic: bool, adapter: Path | None, ranks: RankGroup | None) -> None:
    """Refuse options that modules of transformers do not support, and GGUF files.

    Raises:
        ConfigError: see above; the message names the option.
    """
    refused = {
        "model_impl": checkpoint.gguf_fields is not None and "a GGUF file has the names of a family's weights",
        "deterministic": deterministic and "their operators round rows by the rows beside them",
        "merge_lora": adapter is not None and "adapters are not merged into their weights",
    }
    if ranks is not None:
        raise one_process_only()
    for field, reason in refused.items():
        if reason:
            raise ConfigError(
                f"{field} is not supported with model_impl 'transformers', which computes this model: {reason}",
                field=field,
            )


def load_hosted(
    checkpoint: Checkpoint, spec: HostedSpec, ops: Ops, dtype: torch.dtype, device: torch.device
) -> HostedDecoder:
    """Build the modules of a model of transformers, and load their weights.

    Args:
        checkpoint: the model's files.
        spec: the model, for the longest context that is served.
        ops: kernels.
        dtype: dtype of weights, hidden states and cache.
        device: device of the weights.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or dtype, or is not part of the model.
    """
    module = build_module(spec.config, dtype=dtype)
    use_packed_experts(module)
    use = LayerUse(spec.kept_layers, spec.adapted_layers)
    weights = fill(module, checkpoint, ops=ops, dtype=dtype, device=device, use=use)
    fix_length(module, spec.context_length)
    return HostedDecoder(spec, module, weights, ops=ops, dtype=dtype, device=device)
