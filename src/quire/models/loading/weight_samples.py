"""Digests of tensors by samples of their bytes: enough to tell two checkpoints apart in a second, before loading them.

`fingerprint` reads every byte, and is for caches that outlive a process. Ranks that join compare samples: a few pieces
of every tensor, so that other weights of equal shapes are found whichever matrices they differ in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import blake2b
from typing import Final

from quire.models.tensors.stored_tensor import StoredTensor

# Pieces of a tensor that are read, at equal distances, and their bytes: four kibibytes are a page, which a disk reads
# anyway. Models of very many tensors have fewer pieces of each.
MOST_PIECES: Final = 8
PIECE_BYTES: Final = 4096
MOST_PIECES_IN_ALL: Final = 16384
# Digests of one model; tensors of larger models share them.
MOST_DIGESTS: Final = 2048
# Reads in flight: a network file system takes a millisecond for each.
NUM_THREADS: Final = 8


def sample_weights(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return digests of the names, dtypes, shapes and sampled bytes of tensors, in the order of names.

    Args:
        tensors: the tensors of a checkpoint, by name.

    Returns:
        A digest by the name of its tensor, or of the first of several consecutive tensors.
    """
    names = sorted(tensors)
    size = max(1, -(-len(names) // MOST_DIGESTS))
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    num_pieces = min(MOST_PIECES, max(1, MOST_PIECES_IN_ALL // max(1, len(names))))
    with ExitStack() as stack, ThreadPoolExecutor(NUM_THREADS) as pool:
        paths = {tensor.path for tensor in tensors.values()}
        files = {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}

        def digest(group: Sequence[str]) -> str:
            state = blake2b(digest_size=8)
            for name in group:
                tensor = tensors[name]
                state.update(repr((name, tensor.dtype, tensor.shape, tensor.num_bytes)).encode())
                for piece in _pieces(files[tensor.path], tensor, num_pieces):
                    state.update(piece)
            return state.hexdigest()

        return {group[0]: found for group, found in zip(groups, pool.map(digest, groups), strict=True)}


def _pieces(file: int, tensor: StoredTensor, count: int) -> Iterator[bytes]:
    """Yield `count` pieces of a tensor's bytes, the first and the last among them; all bytes of a small tensor."""
    if tensor.num_bytes <= count * PIECE_BYTES:
        yield os.pread(file, tensor.num_bytes, tensor.offset)
        return
    last = tensor.num_bytes - PIECE_BYTES
    for idx in range(count):
        yield os.pread(file, PIECE_BYTES, tensor.offset + last * idx // max(1, count - 1))
