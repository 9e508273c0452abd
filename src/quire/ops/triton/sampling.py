"""Launches of the sampling kernels; `execution.sampling.device.device_draws` does the same with torch's operators."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from quire.ops.interface.token_draws import NARROW, RowParameters
from quire.ops.triton.kernels import filtered_sampling, sampling
from quire.ops.triton.tiles import power_of_2

# Columns of a tile, and tiles of a program.
TILE: Final = 128
TILES: Final = 32
# Weights are integers: multiples of 2^-44 of the likeliest token's weight; fewer bits if a vocabulary has more than
# 2^18 tokens, so that the sum of a row has at most 62 bits.
WEIGHT_BITS: Final = 44
SUM_BITS: Final = 62
# Maximum number of tokens of a bin that are listed; for a larger bin, the row is read repeatedly.
LISTED: Final = 16_384
BINS: Final = 4096
STATE: Final = 8


class RowPeaks:
    """The maximum logit of each tile of a step's rows."""

    __slots__ = ("logits", "num_tiles", "peaks", "places", "width")

    def __init__(self, logits: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        self.logits, self.num_tiles = logits, -(-vocab_size // TILE)
        self.width = power_of_2(self.num_tiles, 16)
        shape = num_rows, self.num_tiles
        self.peaks = logits.new_empty(shape)
        self.places = logits.new_empty(shape, dtype=torch.int32)
        sampling.find_peaks[num_rows, -(-self.num_tiles // TILES)](
            self.peaks, self.places, logits, vocab_size, self.num_tiles, TILES=TILES
        )


def check_logits(logits: Tensor) -> Tensor:
    """Return the states of rows; see `quire.ops.interface.token_draws.DrawsTokens`."""
    states = logits.new_empty(len(logits), dtype=torch.int64)
    if len(logits):
        rows = RowPeaks(logits)
        sampling.store_states[len(logits),](states, rows.peaks, rows.num_tiles, PEAKS=rows.width)
    return states


def draw_tokens(
    logits: Tensor, parameters: RowParameters | None, positions: Tensor | None, before: Tensor | None
) -> Tensor:
    """Sample a token for each row; see `quire.ops.interface.token_draws.DrawsTokens`."""
    num_rows, vocab_size = logits.shape
    output = logits.new_empty((2, num_rows), dtype=torch.int64)
    if not num_rows:
        return output
    rows = RowPeaks(logits)
    sums = kinds = temperature = seeds = sample_idxs = None
    draws = parameters is not None and parameters.draws
    if parameters is not None and draws:
        assert positions is not None, "a draw has a position"
        kinds, temperature = parameters.kinds, parameters.filters.temperature
        seeds, sample_idxs = parameters.seeds, parameters.sample_idxs
        if parameters.whole is not None:
            sums = _sum_tiles(rows, kinds, temperature)
    pointers = (sums, logits, kinds, temperature, seeds, sample_idxs, positions, before)
    # Any tensor stands in for an unused argument: with None, Triton would compile another variant.
    sampling.choose[num_rows,](
        output, rows.peaks, rows.places, *(output if pointer is None else pointer for pointer in pointers), vocab_size,
        rows.num_tiles, num_rows, SCALE=scale_of(vocab_size), PEAKS=rows.width, DRAWS=draws, CHECKED=before is not None,
    )  # fmt: skip
    if parameters is None or positions is None:  # nothing else is drawn
        return output
    if parameters.few is not None:
        _draw_few(output, rows, parameters, parameters.few, positions)
    if parameters.many is not None:
        _draw_many(output, rows, parameters, parameters.many, positions)
    return output


def scale_of(vocab_size: int) -> float:
    """Return the integer weight of the likeliest token."""
    return 2.0 ** min(WEIGHT_BITS, SUM_BITS - (vocab_size - 1).bit_length())


def _sum_tiles(rows: RowPeaks, kinds: Tensor, temperature: Tensor) -> Tensor:
    """Return the sum of the weights of each tile, int64 [R, tiles], for rows that are sampled from all tokens."""
    num_rows, vocab_size = rows.logits.shape
    sums = kinds.new_empty((num_rows, rows.num_tiles), dtype=torch.int64)
    sampling.sum_tiles[num_rows, -(-rows.num_tiles // TILES)](
        sums, rows.peaks, rows.logits, kinds, temperature, vocab_size, rows.num_tiles, SCALE=scale_of(vocab_size),
        TILES=TILES, PEAKS=rows.width, num_warps=8,
    )  # fmt: skip
    return sums


def _draw_few(output: Tensor, rows: RowPeaks, parameters: RowParameters, few: Tensor, positions: Tensor) -> None:
    """Sample the tokens of rows with a small `top_k`."""
    vocab_size, filters = rows.logits.shape[1], parameters.filters
    # Fewer than `top_k` tiles have peaks above the bound, and at most `top_k` tokens that equal the bound are listed.
    capacity = min(parameters.most_few * (TILE + 1), vocab_size)
    entries = output.new_empty((len(few), capacity))
    firsts = output.new_empty((len(few), NARROW))
    tiles = rows.places.new_empty((len(few), rows.num_tiles))
    filtered_sampling.draw_few[len(few),](
        output, entries, firsts, tiles, rows.peaks, rows.logits, few, *filters, parameters.seeds,
        parameters.sample_idxs, positions, vocab_size, rows.num_tiles, capacity, SCALE=scale_of(vocab_size),
        PEAKS=rows.width, BLOCK=TILE * TILES, num_warps=8,
    )  # fmt: skip


def _draw_many(output: Tensor, rows: RowPeaks, parameters: RowParameters, many: Tensor, positions: Tensor) -> None:
    """Sample the tokens of rows whose filters may keep any number of tokens."""
    vocab_size, filters = rows.logits.shape[1], parameters.filters
    counts = parameters.cuts_many
    numbers = output.new_zeros(len(many) * (BINS * (1 + counts) + STATE))
    bins, states = numbers[STATE * len(many) :], numbers[: STATE * len(many)]
    capacity = min(LISTED, vocab_size)
    entries = output.new_empty((len(many), capacity))
    options: dict[str, Any] = {"SCALE": scale_of(vocab_size), "PEAKS": rows.width}
    grid = len(many), -(-rows.num_tiles // TILES)
    filtered_sampling.fill_bins[grid](
        bins, states, rows.peaks, rows.logits, many, *filters, vocab_size, rows.num_tiles, **options,
        BLOCK=TILE * TILES, COUNTS=counts, num_warps=8,
    )  # fmt: skip
    for stage in range(4 if counts else 3):
        if stage:
            filtered_sampling.list_bin[grid](
                entries, states, rows.peaks, rows.logits, many, filters.temperature, filters.min_p, vocab_size,
                rows.num_tiles, capacity, **options, BLOCK=TILE * TILES, num_warps=8,
            )  # fmt: skip
        filtered_sampling.advance[len(many),](
            output, entries, bins, states, rows.peaks, rows.logits, many, *filters, parameters.seeds,
            parameters.sample_idxs, positions, vocab_size, rows.num_tiles, capacity, **options, BLOCK=1024,
            STARTS=stage == 0, COUNTS=counts, num_warps=4,
        )  # fmt: skip
