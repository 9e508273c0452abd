"""Tile sizes, warps and pipeline stages of the kernels, by compute capability: there is no autotuning."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

# Compute capability whose tile sizes the interpreter uses.
DEFAULT_CAPABILITY: Final = (9, 0)


class Tile(NamedTuple):
    """The tile of an attention program.

    Args:
        rows: number of query rows: the query heads of one KV head, of one token or several.
        tokens: number of keys per iteration.
        num_warps: number of warps of a program.
        num_stages: number of tiles of keys and values in flight (software pipeline stages).
        is_pipelined: the PV matmul overlaps with the softmax of the next tile, if the cache has 16 bits and scores have
            no soft cap.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    is_pipelined: bool = False


@cache
def power_of_2(number: int, least: int = 1) -> int:
    """Return the smallest power of 2 that is no smaller than a number and `least`."""
    return max(least, 1 << (number - 1).bit_length())


# Maximum tokens of a tile of one-byte caches, since more would spill registers: int8, whose loads are 4 bytes wide, and
# for decodes also fp8.
BYTE_TOKENS: Final = 32


def decode_tile(head_dim: int, group: int, element_bytes: int, is_narrow: bool = False) -> Tile:
    """Return the tile of sequences with few rows."""
    rows = power_of_2(group, 16)
    # 64 tokens of 128 dimensions in 16 bits, in three stages: 72 KiB, so that three programs fit on an SM.
    tokens = max(16, 64 * 128 * 2 // (power_of_2(head_dim, 64) * element_bytes))
    # float32 matmuls do not use tensor cores, and take more registers.
    num_warps = 8 if element_bytes == 4 else 4
    if is_narrow:
        # Wide heads of float32 would not fit in four stages; see `prefill_tile`.
        return Tile(rows, min(tokens, BYTE_TOKENS), num_warps, 2 if tokens < 32 and element_bytes == 4 else 4)
    return Tile(rows, min(tokens, 64), num_warps, 3 if tokens >= 64 else 2)


def prefill_tile(
    head_dim: int, group: int, element_bytes: int, capability: tuple[int, int], is_int8: bool = False
) -> Tile:
    """Return the tile of sequences with many rows; `capability` is the GPU's compute capability."""
    tokens = BYTE_TOKENS if is_int8 else 64
    if element_bytes == 4:
        # Consumer GPUs have 99 KiB of shared memory per program: 32 rows of 512 dimensions take 130.
        rows = power_of_2(group, 32 if head_dim <= 256 else 16)
        return decode_tile(head_dim, group, element_bytes, is_int8)._replace(rows=rows)
    width = power_of_2(head_dim, 64) * element_bytes
    if width <= 256:
        # 128 rows spill registers in 4 warps, and before Hopper in 8 warps too.
        if capability[0] >= 9:
            # Only Hopper has asynchronous matmuls of warp groups (WGMMA) that Triton overlaps like this.
            return Tile(power_of_2(group, 128), tokens, 8, 3, is_pipelined=capability[0] == 9)
        return Tile(power_of_2(group, 64), tokens, 4, 2)
    if width <= 512:
        # Not pipelined: the compiler of Triton 3.6 would wait for each matmul instruction.
        return Tile(power_of_2(group, 64), 32, 8, 2)
    return Tile(power_of_2(group, 16), 16, 4, 2)


# Maximum rows of a tile over shared tokens: it is bound by loads of keys, and usually has few rows. Prefills are bound
# by matmuls and have larger tiles.
SHARED_ROWS: Final = 64


def shared_tile(
    head_dim: int, group: int, element_bytes: int, capability: tuple[int, int], is_int8: bool = False
) -> Tile:
    """Return the tile for rows of several sequences over their shared tokens; see `prefill_tile`."""
    tile = prefill_tile(head_dim, group, element_bytes, capability, is_int8)
    rows = min(tile.rows, power_of_2(group, SHARED_ROWS))
    # 64 rows in 4 warps spill registers.
    num_warps = 8 if rows >= SHARED_ROWS else tile.num_warps
    return tile._replace(rows=rows, num_warps=num_warps, is_pipelined=False)


class CorrectionTile(NamedTuple):
    """The columns of a state that a program of the gated delta rule carries from chunk to chunk.

    Args:
        columns: number of columns.
        num_stages: number of chunks in flight (software pipeline stages).
    """

    columns: int
    num_stages: int


# Largest state dimension of Mamba 2 for which float32 rows go in chunks.
MOST_SCANNED_FLOAT32: Final = 128
# Largest key dimension whose tiles fit into shared memory, and whose state columns fit into registers.
MOST_CORRECTED: Final = 128


def correction_tile(values: int, capability: tuple[int, int]) -> CorrectionTile:
    """Return the tile of a state [K, values]; K is no more than MOST_CORRECTED, `values` a power of 2."""
    # On Hopper 32 columns of 128 take 205 registers, and two chunks nearly all shared memory: one program per SM.
    # On other GPUs 32 columns spill. GPUs before Hopper, and small ones, have only 100 KiB of shared memory.
    columns = 32 if capability[0] == 9 else 16
    return CorrectionTile(min(values, columns), 2 if capability[0] in (9, 10) else 1)
