"""Embeddings of ragged texts beside transformers: `python -m benchmarks.embeddings`.

A BERT of the base or the small shape with random weights embeds 256 texts of 8 to 200 tokens, most of them short.
Beside it, transformers does what sentence-transformers does: texts sorted by length, batches of 32, padded to the
longest, the mean of the rows that are no padding, divided by its length. Both get token ids, and both run in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import machine
from quire import LLM
from tests.models.encoders import state_pooling

SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
}
NUM_TEXTS, BATCH = 256, 32
Embed = Callable[[list[list[int]]], torch.Tensor]


def texts(vocab_size: int) -> list[list[int]]:
    """Return token ids of texts whose lengths are log-normal, about 40 in the middle."""
    numbers = random.Random(1)
    lengths = (min(max(round(numbers.lognormvariate(3.7, 0.7)), 8), 200) for _ in range(NUM_TEXTS))
    return [[numbers.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


def with_transformers(model: Any) -> Embed:
    """Return the embedding of texts by transformers, in the manner of sentence-transformers."""

    @torch.inference_mode()
    def embed(prompts: list[list[int]]) -> torch.Tensor:
        order = sorted(range(len(prompts)), key=lambda idx: -len(prompts[idx]))
        found: list[Any] = [None] * len(prompts)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            rows = [torch.tensor(prompts[idx]) for idx in part]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            for idx, each in zip(part, torch.nn.functional.normalize(means, dim=-1), strict=True):
                found[idx] = each.float()
        return torch.stack(found)

    return embed


def with_quire(llm: LLM) -> Embed:
    """Return the embedding of texts by Quire."""
    return lambda prompts: torch.tensor([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)])


def measure(shape: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both in turns, and how alike the embeddings are."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(transformers.BertConfig(**SHAPES[shape])).save_pretrained(folder)
        state_pooling(Path(folder), "pooling_mode_mean_tokens")
        model = transformers.BertModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        with LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            num_threads=options.threads,
            quantization=options.quantization,
        ) as llm:
            prompts = texts(model.config.vocab_size)
            contenders = {"transformers": with_transformers(model), "quire": with_quire(llm)}
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            found = {name: embed(prompts) for name, embed in contenders.items()}
            for _ in range(options.runs):
                for name, embed in contenders.items():
                    started = time.perf_counter()
                    embed(prompts)
                    seconds[name].append(time.perf_counter() - started)
    tokens = sum(map(len, prompts))
    cosine = (found["quire"] * found["transformers"]).sum(-1).min().item()
    ratios = [theirs / ours for theirs, ours in zip(seconds["transformers"], seconds["quire"], strict=True)]
    rates = {name: round(NUM_TEXTS / statistics.median(each), 1) for name, each in seconds.items()}
    print(f"{shape} {dtype}: {rates} texts/s, {statistics.median(ratios):.2f}x, least cosine {cosine:.5f}")
    return {"tokens": tokens, "seconds": seconds, "texts_per_s": rates, "ratios": ratios, "least_cosine": cosine}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="embeddings")
    options = parser.parse_args()
    figures = {
        f"{shape} {dtype}": measure(shape, dtype, options) for shape in options.shapes for dtype in options.dtypes
    }
    print(machine.save(options.name, {"threads": options.threads, "quantization": options.quantization, **figures}))


if __name__ == "__main__":
    main()
