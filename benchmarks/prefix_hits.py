"""Prefix hits of requests that share a prefix, by kind of cache: `python -m benchmarks.prefix_hits`.

Requests share their first tokens and differ behind them. They come one after the other, or all at once. Options are the
defaults, but for memory that holds everything: hits end for reasons of the cache, not for want of room. Weights are
random and tiny, since they decide nothing here. A share is that of the prefix which the requests behind the first one
could have found; the reason is that of the most tokens which they computed.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import RequestOutput
from tests.conformance.checkpoints import VOCAB_SIZE, save_checkpoint

FAMILIES = {
    "qwen3.5": "Qwen3.5: delta nets",
    "falcon-h1": "Falcon-H1: Mamba 2 beside attention",
    "granite4": "Granite 4 hybrid: Mamba 2",
    "lfm2": "LFM2: short convolutions",
    "gemma3": "Gemma 3: windows of 16 tokens",
    "llama3": "Llama 3: attention only",
}
PREFIXES = (100, 500, 2000)
NUM_REQUESTS, SUFFIX, MAX_LEN = 8, 40, 4096


class Found(NamedTuple):
    """Hits of the requests that share a prefix.

    Args:
        by_request: tokens found by each request, in the order of arrival.
        reason: label of the reason for which most tokens behind the first request were computed.
    """

    by_request: list[int]
    reason: str

    def share(self, prefix: int) -> float:
        """Return the share of what the requests behind the first one could have found."""
        return sum(min(count, prefix) for count in self.by_request[1:]) / (prefix * (len(self.by_request) - 1))


def prompts(prefix: int, seed: int) -> list[list[int]]:
    """Return prompts that share a prefix, and no token behind it at the same place."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, VOCAB_SIZE) for _ in range(prefix)]
    first = rng.randrange(10, VOCAB_SIZE - NUM_REQUESTS)
    return [
        [*shared, first + idx, *(rng.randrange(10, VOCAB_SIZE) for _ in range(SUFFIX - 1))]
        for idx in range(NUM_REQUESTS)
    ]


def load(family: str, folder: Path, interval: int | None = None) -> LLM:
    """Load a tiny checkpoint of a family whose context has room for the prompts."""
    save_checkpoint(family, folder, max_position_embeddings=MAX_LEN)
    return LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=256 << 20, state_snapshot_interval=interval)


def measure(llm: LLM, prefix: int, *, at_once: bool) -> Found:
    """Serve the requests of a prefix, and return what they found."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    requests = prompts(prefix, seed=prefix)
    llm.reset_prefix_cache()
    batches: Sequence[list[list[int]]] = [requests] if at_once else [[prompt] for prompt in requests]
    outputs: list[RequestOutput] = [
        output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)
    ]
    reasons: Counter[str] = Counter()
    for output in outputs[1:]:
        assert output.prompt_account is not None
        reasons.update(output.prompt_account.by_reason())
    return Found([output.num_cached_tokens or 0 for output in outputs], reasons.most_common(1)[0][0])


def rows(families: Sequence[str], interval: int | None) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| cache | prefix | in turn | found by each | most computed for | all at once |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        with tempfile.TemporaryDirectory() as folder, load(family, Path(folder), interval) as llm:
            for prefix in PREFIXES:
                turn, once = (measure(llm, prefix, at_once=at_once) for at_once in (False, True))
                counts = ", ".join(map(str, turn.by_request[1:3])) + ", ..."
                yield (
                    f"| {FAMILIES[family]} | {prefix:,} | {turn.share(prefix):.0%} | {counts} | `{turn.reason}` | "
                    f"{once.share(prefix):.0%} |"
                )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*FAMILIES], metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--interval", type=int, help="tokens between snapshots; the engine's default by default")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for line in rows(options.families, options.interval):
        print(line, flush=True)


if __name__ == "__main__":
    main()
