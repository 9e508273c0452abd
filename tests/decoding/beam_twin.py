"""Beam search over plain lists: the slow twin of `quire.sequences.decoding.beams`, and every output there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Log probabilities of all tokens, by the output so far.
Model = Callable[[tuple[int, ...]], Sequence[float]]


class Rules(NamedTuple):
    """What is searched for.

    Args:
        max_tokens: of an output.
        ends: says of an output whether its last token ends it.
    """

    width: int
    max_tokens: int
    ends: Callable[[tuple[int, ...]], bool]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_end_ids: int = 1


class Found(NamedTuple):
    """An output and its score."""

    tokens: tuple[int, ...]
    score: float


NOTHING = Found((), 0.0)


def search(model: Model, rules: Rules) -> list[Found]:
    """Return the hypotheses of a beam search, best first, as `transformers` defines it."""
    running, finished = [NOTHING], list[Found]()
    while True:
        ways = [
            Found((*tokens, token), score + logprob)
            for tokens, score in running
            for token, logprob in enumerate(model(tokens))
            if logprob > -float("inf")
        ]
        ways = sorted(ways, key=lambda way: -way.score)[: rules.width * max(2, 1 + rules.num_end_ids)]
        hits = [rules.ends(way.tokens) or len(way.tokens) == rules.max_tokens for way in ways]
        for way, is_hit in list(zip(ways, hits, strict=True))[: rules.width]:
            if is_hit:
                finished.append(Found(way.tokens, normed(way, rules)))
        finished = sorted(finished, key=lambda way: -way.score)[: rules.width]
        running = [way for way, is_hit in zip(ways, hits, strict=True) if not is_hit][: rules.width]
        if not running or is_over(running[0], finished, rules):
            return finished


def is_over(best: Found, finished: list[Found], rules: Rules) -> bool:
    """Say whether the search ends though beams could go on."""
    if len(finished) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    is_patient = rules.early_stopping == "never" and rules.length_penalty > 0
    length = rules.max_tokens if is_patient else len(best.tokens)
    return not best.score / length**rules.length_penalty > finished[-1].score


def normed(way: Found, rules: Rules) -> float:
    """Return a sum of log probabilities with the length taken into account."""
    divisor: float = len(way.tokens) ** rules.length_penalty
    return way.score / divisor


def every_output(model: Model, rules: Rules, so_far: Found = NOTHING) -> Iterator[Found]:
    """Yield all outputs that end, with their scores."""
    for token, logprob in enumerate(model(so_far.tokens)):
        way = Found((*so_far.tokens, token), so_far.score + logprob)
        if rules.ends(way.tokens) or len(way.tokens) == rules.max_tokens:
            yield Found(way.tokens, normed(way, rules))
        else:
            yield from every_output(model, rules, way)
