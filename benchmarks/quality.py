"""The cost of an option in quality: `python -m benchmarks.quality quantization=int8 quantization=int4`.

Each engine reads the same text and writes on from the same beginnings, and is compared with one that has its defaults.
The text is of the generator that the bundled model was trained on, from a seed that its training did not use; for
another model it is just English.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from benchmarks import machine
from quire import LLM, SamplingParams
from tools.bundled_model.corpus import BOS, documents

HELD_OUT_SEED = 9  # training took 7 and 8, and looked at this one
NUM_START = 24  # tokens of a document that an engine writes on from


@dataclass(frozen=True)
class Reading:
    """The results of one engine on the text.

    Args:
        logprobs: log probability of each token after a document's first.
        tops: the likeliest token at each of those places.
        written: greedy output for each document.
    """

    logprobs: list[float]
    tops: list[int]
    written: list[list[int]]


@dataclass(frozen=True)
class Quality:
    """An engine beside the first.

    Args:
        mean_logprob: mean log probability of the text's tokens.
        perplexity: e to the power of its negative.
        same_top: share of places where both find the same token likeliest.
        same_start: share of what the first wrote that the other wrote alike up to where they part.
    """

    mean_logprob: float
    perplexity: float
    same_top: float
    same_start: float

    @classmethod
    def of(cls, reading: Reading, first: Reading) -> Quality:
        """Compare two readings of the same text."""
        mean = math.fsum(reading.logprobs) / len(reading.logprobs)
        same_tops = sum(ours == theirs for ours, theirs in zip(reading.tops, first.tops, strict=True))
        alike = sum(_num_alike(*pair) for pair in zip(reading.written, first.written, strict=True))
        return cls(mean, math.exp(-mean), same_tops / len(first.tops), alike / sum(map(len, first.written)))


def read(model: str, options: dict[str, Any], texts: list[str], num_new: int) -> Reading:
    """Let an engine read texts, and write on from their beginnings."""
    llm = LLM(model, **options)
    try:
        whole = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        outputs = llm.generate(texts, whole, use_tqdm=False)
        starts: list[Any] = [{"prompt_token_ids": output.prompt_token_ids[:NUM_START]} for output in outputs]
        greedy = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        written = [output.outputs[0].token_ids for output in llm.generate(starts, greedy, use_tqdm=False)]
    finally:
        llm.close()
    logprobs, tops = [], []
    for output in outputs:
        for token_id, found in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert found is not None
            logprobs.append(found[token_id].logprob)
            tops.append(max(found, key=lambda each: found[each].logprob))
    return Reading(logprobs, tops, written)


def parse_options(text: str) -> dict[str, Any]:
    """Read an engine's options, `key=value,key=value`; a value is JSON, or else a word."""
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _num_alike(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((idx for idx, (our, their) in enumerate(pairs) if our != their), len(ours))


def main() -> None:
    """Read with each engine, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "engines", nargs="+", metavar="KEY=VALUE,...", help="options of an engine, which may be none: ''"
    )
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--first", default="", metavar="KEY=VALUE,...", help="options of what all are compared with")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--new", type=int, default=48, help="tokens that are written on from each document")
    parser.add_argument("--name", default="quality", help="the name of the file under results/")
    args = parser.parse_args()
    texts = [
        "".join(text for text, _ in made).removeprefix(BOS) for made in islice(documents(HELD_OUT_SEED), args.documents)
    ]
    first = read(args.model, parse_options(args.first), texts, args.new)
    table: dict[str, Any] = {}
    print(f"{len(first.logprobs):,} tokens of text")
    print(f"{'':32} {'log prob':>9} {'perplexity':>10} {'same top':>9} {'same start':>10}")
    for name in [args.first, *args.engines]:
        reading = first if name == args.first else read(args.model, parse_options(name), texts, args.new)
        quality = Quality.of(reading, first)
        table[name] = asdict(quality)
        print(
            f"{name or 'defaults':32} {quality.mean_logprob:9.4f} {quality.perplexity:10.4f} {quality.same_top:9.2%} "
            f"{quality.same_start:10.2%}"
        )
    settings = {"model": args.model, "documents": args.documents, "new": args.new}
    print(machine.save(args.name, {"settings": settings, "num_tokens": len(first.logprobs), "engines": table}))


if __name__ == "__main__":
    main()
