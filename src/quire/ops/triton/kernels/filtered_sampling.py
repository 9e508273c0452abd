"""Sampling from the tokens that top_k, top_p and min_p keep, without sorting the vocabulary.

A token's key is its distance from the peak, (peak - logit) / temperature, with its float32 bits as an int32. Tokens are
ordered by key, ties by id. Keys and sums of weights are integers, so all of this is exact.

Few tokens (a small `top_k`): the k-th smallest key of the tiles' peaks is an upper bound on the k-th smallest key of
the tokens. So tiles with a peak beyond it have none of the first k tokens; the tokens of other tiles with keys up to
the bound are listed.

Many tokens: a histogram over the upper bits of keys sums up weights by bin, and for `top_k` counts tokens too. In each
stage, the bin in which the sum reaches a goal is found, its tokens are listed, and the key that reaches the goal is
found among them. There are up to three stages: the cut of top_k, the cut of top_p, and the sampled token.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.sampling import TILE, counted, distances, is_finite, load_peaks, uniform_share
from quire.ops.triton.launcher import kernel

# Each octave of distances, from 2^-11 to 32, has 256 bins; smaller distances are in the first bin.
BINS = tl.constexpr(4096)
BIN_ROWS = tl.constexpr(64)
BIN_SHIFT = tl.constexpr(15)
FIRST_BIN = tl.constexpr((0x42000000 >> 15) - 4096)
# Key of a token of weight 0: the bits of infinity.
LAST_KEY = tl.constexpr(0x7F800000)
LAST_ENTRY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
# Maximum number of tokens that `draw_few` keeps of a row.
FEW = tl.constexpr(256)
# Fields of a row's state for many tokens (int64): stage, bin or -1, sum before the bin, goal, number of listed tokens,
# weight before the bin, total weight and, with `top_k`, total number of tokens.
STATE = tl.constexpr(8)
COUNT = tl.constexpr(0)
NUCLEUS = tl.constexpr(1)
POINT = tl.constexpr(2)
DONE = tl.constexpr(3)
PARAMETERS = ["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "sample_idxs"]


@triton.jit
def _keys(logits, peak, temperature):
    return distances(logits, peak, temperature).to(tl.int32, bitcast=True)


@triton.jit
def _weights(keys, min_p, SCALE: tl.constexpr):
    """Return the weights of keys; 0 for tokens that min_p drops."""
    shares = tl.exp(-keys.to(tl.float32, bitcast=True))
    return tl.where(shares >= min_p, counted(shares, SCALE), 0)


@triton.jit
def _bins(keys):
    return tl.maximum((keys >> BIN_SHIFT) - FIRST_BIN, 0)


@triton.jit
def _nucleus(top_p, total):
    """Return the weight that a nucleus must reach: `top_p` times the total, rounded up, at least 1 and at most all."""
    goal = (top_p * total.to(tl.float64)).to(tl.int64)
    goal += (goal.to(tl.float64) < top_p * total.to(tl.float64)).to(tl.int64)
    goal = tl.minimum(tl.maximum(goal, 1), total)
    return tl.where(top_p >= 1.0, total, goal)


@triton.jit
def _peak_bound(keys, top_k):
    """Return the `top_k`-th smallest of the keys by bisection; LAST_KEY if there are fewer."""
    low, high = tl.full([], 0, tl.int32), tl.full([], LAST_KEY, tl.int32)
    while low < high:
        middle = low + ((high - low) >> 1)
        reached = tl.sum((keys <= middle).to(tl.int32), 0) >= top_k
        low, high = tl.where(reached, low, middle + 1), tl.where(reached, middle, high)
    return low


@triton.jit
def _list_few(entries, tiles, logits, bound, peak, temperature, top_k, count, vocab_size, BLOCK: tl.constexpr):
    """List the tokens of `count` tiles with keys up to `bound`, at most `top_k` with that key; return their number."""
    listed, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, count * TILE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(tiles + at // TILE, mask=at < count * TILE, other=0)
        columns = tile * TILE + at % TILE
        is_token = (at < count * TILE) & (columns < vocab_size)
        keys = _keys(tl.load(logits + columns, mask=is_token, other=float("-inf")), peak, temperature)
        is_tie = is_token & (keys == bound)
        rank = ties + tl.cumsum(is_tie.to(tl.int32), 0)
        kept = (is_token & (keys < bound)) | (is_tie & (rank <= top_k))
        entry_idxs = listed + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(entries + entry_idxs, (keys.to(tl.int64) << 32) | columns.to(tl.int64), mask=kept)
        listed += tl.sum(kept.to(tl.int32), 0)
        ties += tl.sum(is_tie.to(tl.int32), 0)
    return listed


@triton.jit
def _cut_few(first, entries, listed, bound, top_k, BLOCK: tl.constexpr):
    """Store the `top_k` smallest entries; return their number."""
    lanes = tl.arange(0, BLOCK)
    # The first entries, usually all, stay in registers.
    first_entries = tl.load(entries + lanes, mask=lanes < listed, other=LAST_ENTRY)
    low, high = tl.full([], 0, tl.int64), ((bound.to(tl.int64) + 1) << 32) - 1
    while low < high:
        middle = low + ((high - low) >> 1)
        count = tl.sum((first_entries <= middle).to(tl.int32), 0)
        for start in range(BLOCK, listed, BLOCK):
            part = tl.load(entries + start + lanes, mask=start + lanes < listed, other=LAST_ENTRY)
            count += tl.sum((part <= middle).to(tl.int32), 0)
        low, high = tl.where(count >= top_k, low, middle + 1), tl.where(count >= top_k, middle, high)
    stored = tl.full([], 0, tl.int32)
    for start in range(0, listed, BLOCK):
        part = tl.load(entries + start + lanes, mask=start + lanes < listed, other=LAST_ENTRY)
        kept = part <= low
        tl.store(first + stored + tl.cumsum(kept.to(tl.int32), 0) - 1, part, mask=kept)
        stored += tl.sum(kept.to(tl.int32), 0)
    return stored


# The alignment of parameter tensors and the capacity differ from step to step: they must not cause recompilation.
@kernel(do_not_specialize=["capacity"], do_not_specialize_on_alignment=PARAMETERS)
def draw_few(
    output, entries, firsts, tiles, peaks, logits, rows, temperatures, top_ks, top_ps, min_ps, seeds, sample_idxs,
    positions, vocab_size, num_tiles, capacity, SCALE: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample the token of a row from its `top_k` likeliest ones, at most FEW, after top_p and min_p."""
    row_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + row_idx)
    own_peaks = load_peaks(peaks, row, num_tiles, PEAKS)
    peak = tl.max(own_peaks, 0)
    if is_finite(peak):
        temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row).to(tl.int32)
        numbers = tl.arange(0, PEAKS)
        keys = tl.where(numbers < num_tiles, _keys(own_peaks, peak, temperature), LAST_KEY)
        bound = _peak_bound(keys, top_k)
        near = (keys <= bound) & (numbers < num_tiles)
        tiles += row_idx * num_tiles
        tl.store(tiles + tl.cumsum(near.to(tl.int32), 0) - 1, numbers, mask=near)
        tl.debug_barrier()
        entries += row_idx * capacity
        count = tl.sum(near.to(tl.int32), 0)
        row_logits = logits + row * vocab_size
        listed = _list_few(entries, tiles, row_logits, bound, peak, temperature, top_k, count, vocab_size, BLOCK)
        tl.debug_barrier()
        firsts += row_idx * FEW
        stored = _cut_few(firsts, entries, listed, bound, top_k, 1024)
        tl.debug_barrier()
        lanes = tl.arange(0, FEW)
        lane_entries = tl.load(firsts + lanes, mask=lanes < stored, other=LAST_ENTRY)
        min_p = tl.load(min_ps + row)
        weights = tl.where(lane_entries == LAST_ENTRY, 0, _weights((lane_entries >> 32).to(tl.int32), min_p, SCALE))
        reached = tl.zeros([FEW], tl.int64)
        for start in range(0, stored, 16):
            others = start + tl.arange(0, 16)
            other = tl.load(firsts + others, mask=others < stored, other=LAST_ENTRY)
            added = tl.where(other == LAST_ENTRY, 0, _weights((other >> 32).to(tl.int32), min_p, SCALE))
            reached += tl.sum(tl.where(other[None, :] <= lane_entries[:, None], added[None, :], 0), 1)
        goal = _nucleus(tl.load(top_ps + row), tl.sum(weights, 0))
        total = tl.min(tl.where(reached >= goal, reached, LAST_ENTRY), 0)
        target = uniform_share(seeds, sample_idxs, positions, row, total)
        at = tl.min(tl.where(reached > target, reached, LAST_ENTRY), 0)
        entry = tl.min(tl.where((reached == at) & (lanes < stored), lane_entries, LAST_ENTRY), 0)
        tl.store(output + row, entry & 0xFFFFFFFF)


@kernel(do_not_specialize_on_alignment=PARAMETERS[:4])
def fill_bins(
    bins, states, peaks, logits, rows, temperatures, top_ks, top_ps, min_ps, vocab_size, num_tiles,
    SCALE: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Add a segment of a row to its histogram, and to its totals.

    Tokens far from the peak, which together weigh less than 1 - top_p, are added to the totals only.
    """
    row_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + row_idx)
    peak = tl.max(load_peaks(peaks, row, num_tiles, PEAKS), 0)
    if is_finite(peak):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf"))
        keys = _keys(values, peak, tl.load(temperatures + row))
        weights = _weights(keys, tl.load(min_ps + row), SCALE)
        kept = weights > 0
        state = states + row_idx * STATE
        tl.atomic_add(state + 6, tl.sum(weights, 0), sem="relaxed")
        # V tokens at distances beyond log(V / (1 - top_p)) weigh less than 1 - top_p together. Two more for rounding.
        tail_share = (1.0 - tl.load(top_ps + row)).to(tl.float32)
        reach = tl.where(tail_share > 0.0, tl.log(vocab_size / tl.maximum(tail_share, 1e-30)) + 2.0, float("inf"))
        if COUNTS:
            tl.atomic_add(state + 7, tl.sum(kept.to(tl.int64), 0), sem="relaxed")
            reach = tl.where(tl.load(top_ks + row) < vocab_size, float("inf"), reach)
        binned = kept & (keys.to(tl.float32, bitcast=True) <= reach)
        token_bins = bins + row_idx * (BINS * (1 + COUNTS)) + _bins(keys)
        tl.atomic_add(token_bins, weights, mask=binned, sem="relaxed")
        if COUNTS:
            tl.atomic_add(token_bins + BINS, tl.full([BLOCK], 1, tl.int64), mask=binned, sem="relaxed")


@kernel(do_not_specialize_on_alignment=["temperatures", "min_ps"])
def list_bin(
    entries, states, peaks, logits, rows, temperatures, min_ps, vocab_size, num_tiles, capacity,
    SCALE: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tokens of a segment of a row that are in its bin; beyond the capacity they are only counted."""
    row_idx = tl.program_id(0).to(tl.int64)
    state = states + row_idx * STATE
    wanted = tl.load(state + 1).to(tl.int32)
    if wanted >= 0:
        row = tl.load(rows + row_idx)
        peak = tl.max(load_peaks(peaks, row, num_tiles, PEAKS), 0)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf"))
        keys = _keys(values, peak, tl.load(temperatures + row))
        kept = (_bins(keys) == wanted) & (_weights(keys, tl.load(min_ps + row), SCALE) > 0)
        count = tl.sum(kept.to(tl.int64), 0)
        if count > 0:
            first = tl.atomic_add(state + 4, count, sem="relaxed")
            at = first + tl.cumsum(kept.to(tl.int64), 0) - 1
            packed = (keys.to(tl.int64) << 32) | columns.to(tl.int64)
            tl.store(entries + row_idx * capacity + at, packed, mask=kept & (at < capacity))


@triton.jit
def _bin_tokens(entries, logits, start, listed, width, peak, temperature, min_p, wanted, SCALE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Return keys, ids and weights of tokens of a bin, from the list or, if `listed` is 0, from the row."""
    at = start + tl.arange(0, BLOCK)
    packed = tl.load(entries + at, mask=at < listed, other=0)
    values = tl.load(logits + at, mask=at < width, other=float("-inf"))
    keys = tl.where(at < listed, (packed >> 32).to(tl.int32), _keys(values, peak, temperature))
    ids = tl.where(at < listed, (packed & 0xFFFFFFFF).to(tl.int32), at)
    return keys, ids, tl.where(_bins(keys) == wanted, _weights(keys, min_p, SCALE), 0)


@triton.jit
def _least_number(missing, unit, most):
    """Return ceil(missing / unit), from 1 to `most`, by bisection.

    A 64-bit division compiles to a function call, which makes the program spill registers.
    """
    low, high = tl.full([], 1, tl.int64), tl.full([], 0, tl.int64) + most
    while low < high:
        middle = low + ((high - low) >> 1)
        reached = middle * unit >= missing
        low, high = tl.where(reached, low, middle + 1), tl.where(reached, middle, high)
    return low


@triton.jit
def _nth_of_row(logits, key, number, vocab_size, peak, temperature, BLOCK: tl.constexpr):
    """Return the id of the `number`-th token (from 1 on) of a row with this key, in the order of ids."""
    seen, token = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        is_tie = ((_keys(values, peak, temperature) == key) & (at < vocab_size)).to(tl.int64)
        ranks = seen + tl.cumsum(is_tie, 0)
        token += tl.sum(tl.where((is_tie > 0) & (ranks == number), at, 0), 0)
        seen += tl.sum(is_tie, 0)
    return token


@triton.jit
def _settle(output, state, entries, logits, row, stage, peak, temperature, min_p, vocab_size, capacity,
            SCALE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Find the key at which the goal is reached among the tokens of the bin; return the weight up to there.

    The last stage stores the sampled token.
    """
    wanted, goal = tl.load(state + 1).to(tl.int32), tl.load(state + 3) - tl.load(state + 2)
    # A bin that exceeds the capacity is not listed whole: then the row itself is read.
    listed, width = tl.load(state + 4).to(tl.int32), tl.full([], 0, tl.int32)
    listed, width = tl.where(listed <= capacity, listed, 0), tl.where(listed <= capacity, width, vocab_size)
    end = tl.maximum(listed, width)
    # The first tokens, usually all, stay in registers. In stage COUNT each token counts as 1.
    keys, ids, weights = _bin_tokens(entries, logits, 0, listed, width, peak, temperature, min_p, wanted, SCALE, BLOCK)
    counts = tl.where(stage == COUNT, (weights > 0).to(tl.int64), weights)
    low = tl.min(tl.where(weights > 0, keys, LAST_KEY), 0)
    high = tl.max(tl.where(weights > 0, keys, 0), 0)
    for start in range(BLOCK, end, BLOCK):
        more, _, added = _bin_tokens(
            entries, logits, start, listed, width, peak, temperature, min_p, wanted, SCALE, BLOCK
        )
        low = tl.minimum(low, tl.min(tl.where(added > 0, more, LAST_KEY), 0))
        high = tl.maximum(high, tl.max(tl.where(added > 0, more, 0), 0))
    while low < high:
        middle = low + ((high - low) >> 1)
        reached = tl.sum(tl.where(keys <= middle, counts, 0), 0)
        for start in range(BLOCK, end, BLOCK):
            more, _, added = _bin_tokens(
                entries, logits, start, listed, width, peak, temperature, min_p, wanted, SCALE, BLOCK
            )
            added = tl.where(stage == COUNT, (added > 0).to(tl.int64), added)
            reached += tl.sum(tl.where(more <= middle, added, 0), 0)
        low, high = tl.where(reached >= goal, low, middle + 1), tl.where(reached >= goal, middle, high)
    weight = tl.sum(tl.where(keys < low, weights, 0), 0)
    count = tl.sum(tl.where(keys < low, counts, 0), 0)
    is_tie = (keys == low) & (weights > 0)
    first_id = tl.min(tl.where(is_tie, ids, vocab_size - 1), 0)
    last_id = tl.max(tl.where(is_tie, ids, 0), 0)
    for start in range(BLOCK, end, BLOCK):
        more, more_ids, added = _bin_tokens(
            entries, logits, start, listed, width, peak, temperature, min_p, wanted, SCALE, BLOCK
        )
        weight += tl.sum(tl.where(more < low, added, 0), 0)
        added_counts = tl.where(stage == COUNT, (added > 0).to(tl.int64), added)
        count += tl.sum(tl.where(more < low, added_counts, 0), 0)
        is_tie = (more == low) & (added > 0)
        first_id = tl.minimum(first_id, tl.min(tl.where(is_tie, more_ids, vocab_size - 1), 0))
        last_id = tl.maximum(last_id, tl.max(tl.where(is_tie, more_ids, 0), 0))
    # All tokens with this key have the same weight: `number` of them are needed to reach the goal.
    token_weight = tl.maximum(_weights(low, min_p, SCALE), 1)
    number = _least_number(goal - count, tl.where(stage == COUNT, 1, token_weight), vocab_size)
    if stage == POINT:
        if width > 0:
            # Columns of the row are in the order of ids: no bisection is needed.
            first_id = _nth_of_row(logits, low, number, vocab_size, peak, temperature, BLOCK)
            last_id = first_id
        while first_id < last_id:
            middle = first_id + ((last_id - first_id) >> 1)
            reached = tl.sum(((keys == low) & (ids <= middle) & (weights > 0)).to(tl.int64), 0)
            for start in range(BLOCK, end, BLOCK):
                more, more_ids, added = _bin_tokens(
                    entries, logits, start, listed, width, peak, temperature, min_p, wanted, SCALE, BLOCK
                )
                reached += tl.sum(((more == low) & (more_ids <= middle) & (added > 0)).to(tl.int64), 0)
            first_id = tl.where(reached >= number, first_id, middle + 1)
            last_id = tl.where(reached >= number, middle, last_id)
        tl.store(output + row, first_id.to(tl.int64))
    return tl.load(state + 5) + weight + number * token_weight


@triton.jit
def _bin_of(bins, goal):
    """Return the bin in which the cumulative sum reaches a goal, and the sum before it, in two levels of BIN_ROWS."""
    places = tl.arange(0, BIN_ROWS)
    rows = tl.sum(tl.load(bins + places[:, None] * BIN_ROWS + places[None, :]), 1)
    row = tl.minimum(tl.sum((tl.cumsum(rows, 0) < goal).to(tl.int32), 0), BIN_ROWS - 1)
    before = tl.sum(tl.where(places < row, rows, 0), 0)
    inner = tl.load(bins + row * BIN_ROWS + places)
    column = tl.sum((before + tl.cumsum(inner, 0) < goal).to(tl.int32), 0)
    return row * BIN_ROWS + column, before + tl.sum(tl.where(places < column, inner, 0), 0)


@kernel(do_not_specialize_on_alignment=PARAMETERS)
def advance(
    output, entries, bins, states, peaks, logits, rows, temperatures, top_ks, top_ps, min_ps, seeds, sample_idxs,
    positions, vocab_size, num_tiles, capacity, SCALE: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr,
    STARTS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """End a stage of a row, and find the bin of the next one; STARTS: the next one is the first."""
    row_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + row_idx)
    state = states + row_idx * STATE
    peak = tl.max(load_peaks(peaks, row, num_tiles, PEAKS), 0)
    stage = tl.full([], DONE, tl.int32)
    goal, total = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if STARTS:
        if is_finite(peak):
            stage, total = tl.full([], NUCLEUS, tl.int32), tl.load(state + 6)
            if COUNTS:
                goal = tl.load(top_ks + row)
                stage = tl.where(goal < tl.load(state + 7), COUNT, stage)
    else:
        stage = tl.load(state).to(tl.int32)
        if stage < DONE:
            total = _settle(
                output, state, entries + row_idx * capacity, logits + row * vocab_size, row, stage, peak,
                tl.load(temperatures + row), tl.load(min_ps + row), vocab_size, capacity, SCALE, BLOCK,
            )  # fmt: skip
            stage += 1
    wanted, before, weight_before = tl.full([], -1, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if stage < DONE:
        top_p = tl.load(top_ps + row)
        stage = tl.where((stage == NUCLEUS) & (top_p >= 1.0), POINT, stage)
        goal = tl.where(stage == NUCLEUS, _nucleus(top_p, total), goal)
        point = uniform_share(seeds, sample_idxs, positions, row, total)
        goal = tl.where(stage == POINT, point + 1, goal)
        row_bins = bins + row_idx * (BINS * (1 + COUNTS))
        if COUNTS:
            wanted, before = _bin_of(row_bins + tl.where(stage == COUNT, BINS, 0), goal)
            numbers = tl.arange(0, BINS)
            weight_before = tl.sum(tl.load(row_bins + numbers, mask=numbers < wanted, other=0), 0)
        else:
            wanted, before = _bin_of(row_bins, goal)
            weight_before = before
    # All threads must have read the state before it is overwritten.
    tl.debug_barrier()
    tl.store(state, stage.to(tl.int64))
    tl.store(state + 1, wanted.to(tl.int64))
    tl.store(state + 2, before)
    tl.store(state + 3, goal)
    tl.store(state + 4, tl.zeros_like(before))
    tl.store(state + 5, weight_before)
