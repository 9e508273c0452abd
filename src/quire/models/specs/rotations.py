"""Rotary position embeddings and their scalings as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones stay, with a smooth change between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies are interpolated by their number of turns within the original context, and attention is sharpened.

    Args:
        attention_factor: factor of cosine and sine.
        truncate: round the ramp's ends to whole frequencies.

    Source: YaRN, arXiv 2309.00071.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first pairs of a head are rotated, by the frequencies of a fully rotated head, divided by `factor`.

    Args:
        fraction: fraction of the head's pairs that are rotated.
    """

    fraction: float
    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency is divided by its own factor, from one of two sets.

    Args:
        short_factors, long_factors: a factor for each pair of a head that is rotated, for contexts of up to the
            original length and for longer ones.
        original_max_position: original length of contexts, in tokens.
        attention_factor: factor of cosine and sine.
        is_long: True if the long factors apply, at all positions. The longest context that is served decides, not the
            length of a sequence: cached keys would be wrong as soon as their sequence became longer.

    Source: LongRoPE, arXiv 2402.13753.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    is_long: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, which pairs the two halves of the rotated values.

    Args:
        num_turned: number of leading values of a head that are rotated, like a head of this size; None for all.
        interleaved: True to pair neighbours instead of halves.

    Source: RoFormer, arXiv 2104.09864.
    """

    theta: float
    scaling: RopeScaling | None = None
    num_turned: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Sections:
    """The axis that each frequency of a rotation belongs to: time, row or column of an image's token.

    The three positions of a text's token are equal.

    Args:
        counts: numbers of frequencies of the three axes.
        interleaved: whether the axes take turns, until one has its number; else they follow each other.

    Source: M-RoPE, Qwen2-VL, arXiv 2409.12191; interleaved in Qwen3-VL, arXiv 2511.21631.
    """

    counts: tuple[int, int, int]
    interleaved: bool

    def axes(self, num_frequencies: int) -> list[int]:
        """Return the axis of each frequency: 0 for time, 1 for the row, 2 for the column."""
        if self.interleaved:
            ends = [3 * count for count in self.counts]
            return [idx % 3 if idx < ends[idx % 3] else 0 for idx in range(num_frequencies)]
        found = [axis for axis, count in enumerate(self.counts) for _ in range(count)]
        return (found + [0] * num_frequencies)[:num_frequencies]


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factors of queries in long contexts: `1 + weight * log(1 + floor((position + offset) / interval))`.

    Source: Scalable-Softmax, arXiv 2501.19399.
    """

    interval: float
    weight: float
    offset: int = 1
