"""Matrices that folders of a family store by columns, [in, out], read as those of linear layers, [out, in]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import find_family
from quire.models.families.gpt2 import COLUMNS
from quire.models.families.score_heads import generating_name
from quire.models.tensors.dtypes import DTYPES, STORED_DTYPES
from quire.models.tensors.stored_tensor import StoredTensor

if TYPE_CHECKING:  # planning reads configurations without torch
    from torch import Tensor

# Architecture -> endings of the names of its matrices that are stored so.
STORED_BY_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {"GPT2LMHeadModel": COLUMNS}


def with_rows(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose matrices are all [out, in]; GGUF files have no others."""
    tensors = checkpoint.tensors
    changed = {name: _transposed(tensors[name]) for name in stored_by_columns(checkpoint)}
    return replace(checkpoint, tensors={**tensors, **changed}) if changed else checkpoint


def stored_by_columns(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the matrices [in, out] of a checkpoint; none for most families."""
    name = find_family(checkpoint.config)
    endings = STORED_BY_COLUMNS.get("" if name is None else generating_name(name, checkpoint.config), ())
    if checkpoint.gguf_fields is not None:
        return ()
    return tuple(_plain_matrices(checkpoint.tensors, endings))


def _plain_matrices(tensors: Mapping[str, StoredTensor], endings: tuple[str, ...]) -> Iterable[str]:
    for name, stored in tensors.items():
        if name.endswith(endings) and len(stored.shape) == 2 and stored.dtype in STORED_DTYPES:
            yield name


def _transposed(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=stored.shape[::-1], decode=partial(_rows, stored))


def _rows(stored: StoredTensor, content: Tensor) -> Tensor:
    """Return the matrix [out, in] of a stored one's bytes, a copy."""
    dtype = DTYPES[STORED_DTYPES[stored.dtype]]
    return content.clone().view(dtype).view(stored.shape).T.contiguous()
