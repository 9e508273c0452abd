"""Loading of a decoder of transformers' modules from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError
from quire.models.adapters.expert_layers import ExpertLayers
from quire.models.adapters.names import module_key
from quire.models.adapters.peft_folder import ModuleShape
from quire.models.adapters.slots import AdapterSlots
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import WEIGHT
from quire.models.hosted.build import build_module
from quire.models.hosted.choice import one_process_only
from quire.models.hosted.decoder import HostedDecoder
from quire.models.hosted.experts import use_packed_experts
from quire.models.hosted.linear import LayerUse
from quire.models.hosted.norms import use_backend_norms
from quire.models.hosted.rope import fix_length
from quire.models.hosted.weights import fill
from quire.models.modules.causal_model import CausalModel
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
    use_backend_norms(module, ops, dtype)
    return HostedDecoder(spec, module, weights, ops=ops, dtype=dtype, device=device)


def make_hosted_slots(decoder: CausalModel, max_rank: int) -> AdapterSlots:
    """Make the linear layers of a decoder of transformers' modules take adapters, by their names in the modules.

    Args:
        decoder: decoder with all its weights.
        max_rank: largest rank of an adapter.

    Raises:
        ConfigError: none of its linear layers can take adapters, which are applied by row.
    """
    assert isinstance(decoder, HostedDecoder), "modules of transformers compute a decoder that no family describes"
    layers = {name: slot.adapted[0] for name, slot in decoder.weights.slots.items() if slot.adapted}
    if not layers:
        raise ConfigError(
            f"enable_lora is not supported for {decoder.spec.architecture}: adapters are applied to linear layers that "
            "take all rows of a step, and it has none",
            field="enable_lora",
        )
    shapes = {name: ModuleShape(*adapted.projection.slots["weight"].shape[::-1]) for name, adapted in layers.items()}
    return AdapterSlots(
        decoder,
        {name: (name,) for name in layers},
        lambda name: shapes[name].out_width,
        max_rank,
        ExpertLayers(None, {}),
        {module_key(name.removesuffix(WEIGHT)): shape for name, shape in shapes.items()},
    )
