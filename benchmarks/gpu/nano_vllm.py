"""The requests of nano-vllm's benchmark."""

from __future__ import annotations

import random
from typing import NamedTuple

NUM_REQUESTS, LEAST, MOST = 256, 100, 1024
TEMPERATURE = 0.6


class NanoRequest(NamedTuple):
    """One request.

    Args:
        prompt: token ids.
        num_outputs: number of tokens to generate, whatever they are.
    """

    prompt: list[int]
    num_outputs: int


def nano_requests(
    vocab_size: int, count: int = NUM_REQUESTS, least: int = LEAST, most: int = MOST
) -> list[NanoRequest]:
    """Return requests whose prompts and answers have from `least` to `most` tokens, the same at every call."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(rng.randint(least, most))] for _ in range(count)]
    return [NanoRequest(prompt, rng.randint(least, most)) for prompt in prompts]
