"""Selection of layers by the targets, exceptions and rules of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.errors import CheckpointError
from quire.models.stored_quantization.scheme import PLAIN
from quire.models.tensors.stored_tensor import StoredTensor
from quire.platform.bounded.patterns import match_names


def match_layers(patterns: Iterable[str], stored: Mapping[str, StoredTensor]) -> dict[str, frozenset[str]]:
    """Return the quantised layers whose names begin with a match of a regular expression, by expression."""
    names = {name.rpartition(".")[0] for name, tensor in stored.items() if tensor.dtype not in PLAIN}
    try:
        return match_names(patterns, sorted(names))
    except ValueError as error:
        raise CheckpointError(f"config.json: quantization_config: {error}", field="quantization_config") from error
