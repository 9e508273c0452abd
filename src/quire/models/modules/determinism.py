"""Models that give a token the same bits in every batch."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.specs.spec import Attention, LayerSpec, ModelSpec, experts_of
from quire.ops.cpu.native_library import MAX_HEAD_DIM


def check_deterministic(spec: ModelSpec) -> None:
    """Reject a model with a part whose results depend on the batch, or are not shown to be independent of it.

    Chunks of a recurrence are summed differently than single rows; stock vectorised operators round sigmoids of the
    remaining elements, and scaled sums, differently.
    """
    found = next((part for layer in spec.layers for part in hindrances(layer)), None)
    if spec.per_layer_inputs is not None:
        found = "what every layer is told of a token besides the hidden state"
    if found is not None:
        raise ConfigError(
            f"deterministic is for models of attention and gated MLPs, and this one has {found}: leave deterministic "
            "out",
            field="deterministic",
        )


def hindrances(layer: LayerSpec) -> list[str]:
    """Return the names of a layer's parts that may depend on the batch."""
    found = []
    for part in layer.parts:
        if not isinstance(part, Attention):
            found.append("a recurrent state")
        elif part.output_gate:
            found.append("gates on what attention gathers")
        elif part.head_dim > MAX_HEAD_DIM or part.head_dim % 2:
            found.append(f"heads of {part.head_dim} values, not an even number up to {MAX_HEAD_DIM}")
    experts = experts_of(layer.ffn)
    if experts is not None and experts.scoring == "sigmoid":
        found.append("experts scored by a sigmoid")
    if experts is not None and experts.shared_gate:
        found.append("a gate on a shared expert")
    if layer.mixer_scale != 1.0 or layer.ffn_scale != 1.0:
        found.append("scaled additions to the hidden state")
    return found
