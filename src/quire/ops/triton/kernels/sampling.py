"""Greedy sampling, and sampling from all tokens.

```
 a row       |<-- tile -->|<-- tile -->| ...            TILE columns each; a program has TILES of them
 peaks       | maximum    | maximum    | ...            and its first column; a NaN counts as infinity
 weights     exp(-(peak of the row - logit) / temperature) as integers, in units of 1 / SCALE
 sums        | of weights | of weights | ...
```

Integer sums are exact in any order, so a token does not depend on how a row is divided, on the order of atomics or on
other rows. A token whose weight is below 1 / SCALE of the likeliest token's is never sampled.
"""

import triton
import triton.language as tl

from quire.ops.triton.launcher import kernel

TILE = tl.constexpr(128)
# Kinds and states of rows: `quire.ops.interface.token_draws`.
GREEDY = tl.constexpr(0)
WHOLE = tl.constexpr(1)
FINE = tl.constexpr(0)
NOTHING_LEFT = tl.constexpr(1)
BROKEN = tl.constexpr(2)


@kernel
def find_peaks(peaks, places, logits, vocab_size, num_tiles, TILES: tl.constexpr):
    """Store the maximum logit of each of TILES tiles of a row, and the first column with that logit."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf"))
    values = tl.where(values == values, values, float("inf"))
    peak = tl.max(values, 1)
    column = tl.min(tl.where(values == peak[:, None], columns, vocab_size - 1), 1)
    is_tile = tiles < num_tiles
    tl.store(peaks + row * num_tiles + tiles, peak, mask=is_tile)
    tl.store(places + row * num_tiles + tiles, column, mask=is_tile)


@triton.jit
def load_peaks(peaks, row, num_tiles, PEAKS: tl.constexpr):
    """Load the peaks of a row's tiles."""
    tiles = tl.arange(0, PEAKS)
    return tl.load(peaks + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))


@triton.jit
def is_finite(value):
    """Return whether a value that is not NaN is finite."""
    return tl.abs(value) < float("inf")


@triton.jit
def distances(logits, peak, temperature):
    """Return (peak - logit) / temperature, rounded after each operation as in `device_draws`."""
    below = peak - logits
    return tl.div_rn(below, temperature + tl.zeros_like(below))


@triton.jit
def counted(shares, SCALE: tl.constexpr):
    """Return weights of at most 1 as integers, in units of 1 / SCALE, rounded down."""
    return (shares * SCALE).to(tl.int64)


@kernel
def sum_tiles(sums, peaks, logits, kinds, temperatures, vocab_size, num_tiles, SCALE: tl.constexpr,
              TILES: tl.constexpr, PEAKS: tl.constexpr):  # fmt: skip
    """Store the sum of the weights of each of TILES tiles of a row that is sampled from all tokens."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(kinds + row) == WHOLE:
        peak = tl.max(load_peaks(peaks, row, num_tiles, PEAKS), 0)
        if is_finite(peak):
            tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
            columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf"))
            shares = tl.exp(-distances(values, peak, tl.load(temperatures + row)))
            tl.store(sums + row * num_tiles + tiles, tl.sum(counted(shares, SCALE), 1), mask=tiles < num_tiles)


@triton.jit
def _mixed(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform_share(seeds, sample_idxs, positions, row, total):
    """Return the row's uniform number of 53 bits times `total` (int64), rounded down: less than `total`, int64."""
    value = _mixed(tl.load(seeds + row).to(tl.uint64))
    value = _mixed(value ^ tl.load(sample_idxs + row).to(tl.uint64))
    value = _mixed(value ^ tl.load(positions + row).to(tl.uint64))
    return tl.umulhi((value >> 11) << 11, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _drawn_from_all(sums, logits, peak, temperature, seeds, sample_idxs, positions, row, vocab_size, num_tiles,
                    SCALE: tl.constexpr, PEAKS: tl.constexpr):  # fmt: skip
    """Return the first column at which the cumulative weight exceeds the row's share of the total."""
    tiles = tl.arange(0, PEAKS)
    is_tile = tiles < num_tiles
    tile_sums = tl.load(sums + row * num_tiles + tiles, mask=is_tile, other=0)
    target = uniform_share(seeds, sample_idxs, positions, row, tl.sum(tile_sums, 0))
    tile = tl.sum(((tl.cumsum(tile_sums, 0) <= target) & is_tile).to(tl.int32), 0)
    before = tl.sum(tl.where(tiles < tile, tile_sums, 0), 0)
    columns = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf"))
    weights = counted(tl.exp(-distances(values, peak, temperature)), SCALE)
    return tile * TILE + tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)


# The number of rows and the alignment of their parameters differ from step to step: they must not cause recompilation.
@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperatures", "seeds", "sample_idxs"])
def choose(
    output, peaks, places, sums, logits, kinds, temperatures, seeds, sample_idxs, positions, before, vocab_size,
    num_tiles, num_rows, SCALE: tl.constexpr, PEAKS: tl.constexpr, DRAWS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Store the state of each row, and its token if it is greedy, sampled from all tokens, or not FINE (then 0).

    Without DRAWS all rows are greedy. With CHECKED, `before` has the states before requests changed the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    row_peaks = load_peaks(peaks, row, num_tiles, PEAKS)
    peak = tl.max(row_peaks, 0)
    state = tl.where(is_finite(peak), FINE, BROKEN)
    if CHECKED:
        state = tl.where(peak == float("-inf"), NOTHING_LEFT, state)
        earlier = tl.load(before + row).to(tl.int32)
        state = tl.where(earlier == FINE, state, earlier)
    tl.store(output + num_rows + row, state.to(tl.int64))
    kind = GREEDY
    if DRAWS:
        kind = tl.load(kinds + row)
    if is_finite(peak):
        if kind == GREEDY:
            tiles = tl.arange(0, PEAKS)
            tile = tl.min(tl.where(row_peaks == peak, tiles, PEAKS), 0)
            tl.store(output + row, tl.load(places + row * num_tiles + tile).to(tl.int64))
        if DRAWS:  # noqa: SIM102 - the compiler decides the outer condition
            if kind == WHOLE:
                temperature = tl.load(temperatures + row)
                token = _drawn_from_all(
                    sums, logits, peak, temperature, seeds, sample_idxs, positions, row, vocab_size, num_tiles, SCALE,
                    PEAKS,
                )  # fmt: skip
                tl.store(output + row, token.to(tl.int64))
    else:
        tl.store(output + row, tl.zeros_like(row))


@kernel
def store_states(states, peaks, num_tiles, PEAKS: tl.constexpr):
    """Store the state of a row before requests change its logits."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.max(load_peaks(peaks, row, num_tiles, PEAKS), 0)
    tl.store(states + row, tl.where(is_finite(peak), FINE, BROKEN).to(tl.int64))
