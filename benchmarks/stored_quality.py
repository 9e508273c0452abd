"""The cost of stored formats in quality: `python -m benchmarks.stored_quality [MODEL]`.

The model is written in each format by `quire quantize`, reads held-out text of the generator that the bundled model was
trained on, and is compared with itself in bfloat16: perplexity of the parts that such models learn to write, KL
divergence of the probabilities of all tokens, and the share of places where the likeliest token is the same. The
default text of a calibration is of the same generator, from another seed.

A model of 23 million parameters: the last command of `tools/bundled_model/train.py`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from quire.cli.quantization.paged_rows import run_sequences, split_sequences
from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.text.tokenizers.tokenizer import Tokenizer
from tools.bundled_model.corpus import documents

FORMATS = {
    "int8": QuantizeOptions("int8"),
    "int4, rounded": QuantizeOptions("int4", "rounded"),
    "int4, calibrated": QuantizeOptions("int4"),
    "int4 with zero points, rounded": QuantizeOptions("int4", "rounded", symmetric=False),
    "int4 with zero points, calibrated": QuantizeOptions("int4", symmetric=False),
    **{name: QuantizeOptions(name) for name in ("q8_0", "q6_k", "q5_k", "q4_k_m", "q4_k", "q4_0")},
}
STEP_TOKENS = 2048
HELD_OUT_SEED = 9  # training took 7 and 8, and looked at this one


@dataclass(frozen=True)
class FormatQuality:
    """A stored format beside bfloat16.

    Args:
        num_bytes: number of bytes of the weights in files.
        perplexity: perplexity of stories and answers; that of what users say, which no model learned, is noise.
        divergence: mean KL divergence from the probabilities in bfloat16, in nats.
        same_top: share of places with the same likeliest token.
    """

    num_bytes: int
    perplexity: float
    divergence: float
    same_top: float


class HeldOutText:
    """Documents as tokens, and what the model in bfloat16 makes of them.

    Args:
        model: name or path of the model.
        num_documents: number of documents.
    """

    def __init__(self, model: str, num_documents: int) -> None:
        tokenizer = Tokenizer.from_folder(Checkpoint.open(model).folder)
        sequences = [
            [
                (token_id, is_learned)
                for text, is_learned in made
                for token_id in tokenizer.encode(text, add_special_tokens=False)
            ]
            for made in islice(documents(HELD_OUT_SEED), num_documents)
        ]
        tokens = [token for each in sequences for token in each]
        self._ids = torch.tensor([token_id for token_id, _ in tokens])
        self._lengths = [len(each) for each in sequences]
        self._has_next = torch.ones(len(self._ids), dtype=torch.bool)
        self._has_next[torch.tensor(self._lengths).cumsum(0) - 1] = False
        self._targets = self._ids.roll(-1)[self._has_next]
        self._is_learned = torch.tensor([is_learned for _, is_learned in tokens]).roll(-1)[self._has_next]
        self._first = self._logprobs(model)[0]

    def quality(self, model: str) -> FormatQuality:
        """Compare a stored form of the model with bfloat16."""
        logprobs, num_bytes = self._logprobs(model)
        own = logprobs.gather(1, self._targets[:, None])[self._is_learned].double()
        divergences = (self._first.exp() * (self._first - logprobs)).sum(-1)
        same = logprobs.argmax(-1) == self._first.argmax(-1)
        return FormatQuality(
            num_bytes, math.exp(-own.mean().item()), divergences.double().mean().item(), same.float().mean().item()
        )

    def _logprobs(self, model: str) -> tuple[Tensor, int]:
        """Return the log probabilities of all tokens at each place with a next token, and the bytes of the weights."""
        checkpoint = Checkpoint.open(model)
        decoder = load_decoder(checkpoint, device="cpu", dtype=torch.bfloat16)
        parts = []
        with torch.inference_mode():
            for rows, lengths in split_sequences(self._lengths, STEP_TOKENS):
                hidden = run_sequences(decoder, self._ids[rows], lengths)
                parts.append(decoder.logits(hidden[self._has_next[rows]]).log_softmax(-1))
        return torch.cat(parts), sum(tensor.num_bytes for tensor in checkpoint.tensors.values())


def main() -> None:
    """Write the model in each format, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS], metavar="FORMAT")
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--name", default="stored-quality", help="name of the file under results/")
    args = parser.parse_args()
    text = HeldOutText(args.model, args.documents)
    table: dict[str, Any] = {}
    print("| format | bytes | perplexity | KL divergence | same likeliest token |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for idx, name in enumerate(["bfloat16", *args.formats]):
            path = args.model
            if idx:
                options = replace(FORMATS[name], calibration_tokens=args.calibration_tokens)
                path = str(Path(folder) / f"{idx}{'' if options.to.startswith('int') else '.gguf'}")
                quantize(args.model, Path(path), options)
            found = text.quality(path)
            table[name] = asdict(found)
            print(
                f"| {name} | {found.num_bytes:,} | {found.perplexity:.4f} | {found.divergence:.5f} | "
                f"{found.same_top:.2%} |",
                flush=True,
            )
    settings = {"model": args.model, "documents": args.documents, "calibration_tokens": args.calibration_tokens}
    print(machine.save(args.name, {"settings": settings, "formats": table}))


if __name__ == "__main__":
    main()
