"""The sampler's slow twin: one row at a time, in plain Python floats."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from typing import Any

from hypothesis import strategies as st

from quire.execution.sampling.sampling import Filter
from quire.scheduling.plan import NewSequence
from quire.sequences.params import SamplingParams

VOCAB = 40
# Above 0, but 0, denormal or the smallest normal number in float32.
TINY = (5e-324, 1e-300, 1e-46, 1e-40, 1.2e-38)
token = st.integers(0, VOCAB - 1)
quarter = st.integers(-24, 24).map(lambda n: n / 4)


@st.composite
def openings(draw: st.DrawFn) -> NewSequence:
    options: dict[str, Any] = {}
    knobs = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7, *TINY]),
        "top_k": st.integers(1, VOCAB + 5),
        "top_p": st.sampled_from([0.01, 0.37, 0.8, 0.951, 0.9999, *TINY]),
        "min_p": st.sampled_from([0.001, 0.07, 0.6, 1.0, *TINY]),
        "typical_p": st.sampled_from([0.05, 0.413, 0.87, 0.9993, *TINY]),
        "top_n_sigma": st.sampled_from([0.31, 1.03, 2.7, *TINY]),
        "dry_multiplier": st.sampled_from([0.4, 1.0, 3.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 2.5]),
        "dry_allowed_length": st.integers(1, 3),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 5, 100]),
        "repetition_penalty": st.sampled_from([0.01, 0.5, 1.25, 2.0, 100.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.25, 1.5]),
        "frequency_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
        "logit_bias": st.dictionaries(token, quarter, max_size=4),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=6),
        "min_tokens": st.integers(1, 6),
    }
    for name in draw(st.sets(st.sampled_from(sorted(knobs)))):
        options[name] = draw(knobs[name])
    # Of few different ones, so that sequences repeat themselves.
    tokens = st.integers(0, 4) | token
    prompt = draw(st.lists(tokens, min_size=1, max_size=8))
    output = draw(st.lists(tokens, max_size=12))
    bad_words = tuple(draw(st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4)))
    if bad_words:
        options["bad_words"] = ["said at the door"]
    return NewSequence(
        params=SamplingParams(**options),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        sample_idx=draw(st.integers(0, 5)),
        num_prompt=len(prompt),
        token_ids=tuple(prompt + output),
        suppressed_ids=tuple(draw(st.lists(token, max_size=3))),
        bad_words=bad_words,
        dry_breakers=tuple(draw(st.lists(tokens, max_size=2))),
    )


def adjusted(logits: list[float], new_sequence: NewSequence) -> list[float]:
    """Return a row's logits after masks, bias and penalties."""
    params = new_sequence.params
    values = list(logits)
    if params.allowed_token_ids is not None:
        values = [value if i in params.allowed_token_ids else -math.inf for i, value in enumerate(values)]
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    output = Counter(new_sequence.token_ids[new_sequence.num_prompt :])
    for *beginning, last in new_sequence.bad_words:
        tail = list(new_sequence.token_ids[new_sequence.num_prompt :])
        if tail[len(tail) - len(beginning) :] == beginning:
            values[last] = -math.inf
    if output.total() < params.min_tokens:
        for token_id in new_sequence.suppressed_ids:
            values[token_id] = -math.inf
    for token_id in set(new_sequence.token_ids):
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id, count in output.items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id, length in repeats(new_sequence).items():
        if params.dry_multiplier and length >= params.dry_allowed_length:
            values[token_id] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return values


def repeats(new_sequence: NewSequence) -> dict[int, int]:
    """Return the tokens with which the sequence would go on as it did before, and for how long both are alike."""
    tokens, last_n = list(new_sequence.token_ids), new_sequence.params.dry_penalty_last_n
    if last_n >= 0:
        tokens = tokens[len(tokens) - min(last_n, len(tokens)) :]
    found: dict[int, int] = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[-1 - length] not in new_sequence.dry_breakers:
            length += 1
        if length and tokens[end] not in new_sequence.dry_breakers:
            found[tokens[end]] = max(found.get(tokens[end], 0), length)
    return found


def kept(values: list[float], filters: Filter) -> dict[int, float]:
    """Return the tokens that may be drawn, in the order of the draw, and the share of each."""
    best = max(values)
    weights = {i: math.exp((value - best) / filters.temperature) for i, value in enumerate(values)}
    weights = typical(near_best(weights, values, filters.top_n_sigma), filters.typical_p)
    if not filters.keeps_all:
        ranked = sorted(weights, key=lambda i: (-values[i], i))
        most = max(weights.values())
        ranked = [i for i in ranked if weights[i] >= filters.min_p * most]
        ranked = ranked[: filters.top_k or len(ranked)]
        wanted = filters.top_p * math.fsum(weights[i] for i in ranked)
        sums = itertools.accumulate((weights[i] for i in ranked), initial=0.0)
        # The likeliest is kept where the product rounds to 0, too.
        weights = {i: weights[i] for i, before in zip(ranked, sums, strict=False) if before < wanted or not before}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def near_best(weights: dict[int, float], values: list[float], num_sigmas: float) -> dict[int, float]:
    """Return what top-n-sigma leaves of some tokens; what is forbidden is in nothing."""
    open_values = [value for value in values if value > -math.inf]
    mean = math.fsum(open_values) / len(open_values)
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in open_values) / len(open_values))
    edge = max(values) - num_sigmas * sigma
    return {i: weight for i, weight in weights.items() if not num_sigmas or values[i] >= edge}


def typical(weights: dict[int, float], typical_p: float) -> dict[int, float]:
    """Return what typical sampling leaves of some tokens, in their order."""
    if typical_p == 1.0:
        return weights
    total = math.fsum(weights.values())
    surprise = {i: -math.log(weight / total) for i, weight in weights.items() if weight > 0.0}
    entropy = math.fsum(weights[i] / total * value for i, value in surprise.items())
    # Equally far within rounding is equally far: then the lower id comes first.
    ranked = sorted(surprise, key=lambda i: (round(abs(surprise[i] - entropy), 9), i))
    sums = itertools.accumulate((weights[i] / total for i in ranked), initial=0.0)
    left = {i for i, before in zip(ranked, sums, strict=False) if before < typical_p}
    return {i: weight for i, weight in weights.items() if i in left}


def chosen(values: list[float], filters: Filter, point: float) -> int:
    """Return the token that `point` in [0, 1) draws."""
    if filters.temperature == 0.0:
        return values.index(max(values))
    shares = kept(values, filters)
    place = bisect.bisect_right(list(itertools.accumulate(shares.values())), point)
    return list(shares)[min(place, len(shares) - 1)]
