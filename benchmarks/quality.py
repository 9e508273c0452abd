"""The quality of a GGUF file in Quire's forms and in peers: `python -m benchmarks.quality FILE --folder TWIN`.

All are compared, on the text of `quire bench quality`, with the exact values of the file: its weights, dequantised,
multiplied in float32. Forms with `--quantization` are those of the twin, a folder with the same weights in 16 or 32
bits. Peers get the same token ids and give logits of all positions. Prints a table and saves it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.peer_logits import READERS, PeerReader
from quire.config import EngineConfig
from quire.measurement.bench.divergence import Divergence, DivergenceTally, GreedyAgreement
from quire.measurement.bench.exact_ops import ExactOps
from quire.measurement.bench.quality import PIECE, ReadingEngine, exact_config
from quire.measurement.bench.quality_text import greedy_prompts, read_quality_text
from quire.ops.interface.ops import Ops
from quire.platform.host_probe import probe

BF16, F32 = {"dtype": "bfloat16"}, {"dtype": "float32"}


class Form(NamedTuple):
    """A form in which Quire serves a model.

    Args:
        options: options of the engine.
        is_folder: whether it is that of the folder with the same weights.
    """

    options: dict[str, Any]
    is_folder: bool = False


FORMS = {
    "bfloat16": Form(BF16),
    "float32": Form(F32),
    "float32, torch": Form(F32 | {"kernels": "torch"}),
    **{f"bfloat16, KV {kv}": Form(BF16 | {"kv_cache_dtype": kv}) for kv in ("float16", "float32", "fp8", "int8")},
    "16 bits, bfloat16": Form(BF16, is_folder=True),
    **{
        f"{bits}, {dtype['dtype']}": Form(dtype | {"quantization": bits}, is_folder=True)
        for bits in ("int8", "int4")
        for dtype in (BF16, F32)
    },
}


class QualityRow(NamedTuple):
    """A form or a peer beside the exact values."""

    name: str
    divergence: Divergence
    greedy: GreedyAgreement


class ExactText:
    """The exact values of a file on the text.

    Args:
        file: the checkpoint.
        num_prompts, num_tokens: numbers of greedy outputs, and of their tokens.
        max_tokens: maximum number of tokens of the text; 0 for no limit.
        text: file of the text; None for the bundled one.
    """

    def __init__(self, file: Path, num_prompts: int, num_tokens: int, max_tokens: int, text: Path | None) -> None:
        config = EngineConfig.from_options(model=str(file))
        tokenizer_engine = ReadingEngine(config)
        tokenizer = tokenizer_engine.tokenizer
        self.sequences = read_quality_text(tokenizer, text, tokenizer_engine.max_length, max_tokens)
        self.prompts = greedy_prompts(tokenizer, num_prompts, None if text is None else self.sequences)
        tokenizer_engine.close()
        self.num_tokens = num_tokens
        room = probe("cpu").available_bytes // 2
        self._engine = ReadingEngine(exact_config(config), lambda _: ExactOps(room))
        self.vocab_size = self._engine.vocab_size
        self._hidden = [self._engine.hidden(ids)[:-1] for ids in self.sequences]
        self._greedy = self._engine.greedy(self.prompts, num_tokens)

    def compare(self, name: str, read: Callable[[list[int]], Iterator[Tensor]], greedy: list[list[int]]) -> QualityRow:
        """Compare logits and greedy outputs.

        Args:
            name: name of the row.
            read: function from a sequence to the logits of its positions, in order, some at a time.
            greedy: outputs after the prompts.
        """
        tally = DivergenceTally()
        for ids, hidden in zip(self.sequences, self._hidden, strict=True):
            targets, first = torch.tensor(ids[1:]), 0
            for logits in read(ids):
                part = slice(first, first + len(logits))
                count = len(targets[part])  # nothing follows the last position
                if count:
                    tally.add(logits[:count], self._engine.logits(hidden[part]), targets[part])
                first += len(logits)
            assert first == len(ids), "logits of all positions"
        return QualityRow(name, tally.result(), GreedyAgreement.of(greedy, self._greedy))

    def of_form(self, name: str, config: EngineConfig, wrap_ops: Callable[[Ops], Ops] = lambda ops: ops) -> QualityRow:
        """Compare a served form, perhaps with other kernels than those of its options."""
        engine = ReadingEngine(config, wrap_ops)
        size = max(1, PIECE // self.vocab_size)

        def read(ids: list[int]) -> Iterator[Tensor]:
            hidden = engine.hidden(ids)
            for first in range(0, len(ids), size):
                yield engine.logits(hidden[first : first + size])

        try:
            return self.compare(name, read, engine.greedy(self.prompts, self.num_tokens))
        finally:
            engine.close()

    def of_peer(self, name: str, reader: PeerReader) -> QualityRow:
        """Compare a peer."""
        size = max(1, PIECE // self.vocab_size)
        return self.compare(
            name, lambda ids: reader.logits(ids, self.vocab_size, size), reader.greedy(self.prompts, self.num_tokens)
        )


def lines(rows: list[QualityRow]) -> Iterator[str]:
    """Yield the table."""
    yield "| | KL mean | median | 99th percentile | largest | perplexity | same best token | greedy equal | tokens |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, found, greedy in rows:
        yield (
            f"| {name} | {found.kl_mean:.5f} | {found.kl_median:.5f} | {found.kl_p99:.4f} | {found.kl_max:.3f} | "
            f"{found.perplexity:.3f} | {found.same_best:.1%} | {greedy.num_equal} of {greedy.num_prompts} | "
            f"{greedy.mean_equal_tokens:.1f} |"
        )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file, or another checkpoint")
    parser.add_argument("--folder", type=Path, help="a folder with the same weights in 16 or 32 bits")
    parser.add_argument("--forms", default=";".join(FORMS), help="of Quire, with semicolons between; '' for none")
    for name in READERS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"interpreter of an environment that has {name}")
    parser.add_argument("--openvino-model", type=Path, help="the folder, exported for OpenVINO")
    parser.add_argument("--text", type=Path, help="text to read; the bundled one by default")
    parser.add_argument("--tokens", type=int, default=0, help="most tokens of the text; all by default")
    parser.add_argument("--greedy", type=int, nargs=2, default=(20, 32), metavar=("PROMPTS", "TOKENS"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="quality", help="the name of the file under results/")
    args = parser.parse_args()
    num_prompts, num_tokens = args.greedy
    exact = ExactText(args.file, num_prompts, num_tokens, args.tokens, args.text)
    rows: list[QualityRow] = []
    versions: dict[str, str | None] = {}

    def add(row: QualityRow) -> None:
        rows.append(row)
        print(list(lines([row]))[-1], flush=True)

    for name in READERS:
        python = getattr(args, f"{name}_python")
        model = getattr(args, READERS[name].model)
        if python is not None and model is not None:
            with PeerReader(python, name, model, args.threads) as reader:
                versions[name] = reader.version
                add(exact.of_peer(name, reader))
    for name in filter(None, args.forms.split(";")):
        form = FORMS[name]
        if form.is_folder and args.folder is None:
            continue
        options = form.options | {"num_threads": args.threads}
        add(
            exact.of_form(
                name, EngineConfig.from_options(model=str(args.folder if form.is_folder else args.file), **options)
            )
        )
    report(args.name, rows, {"model": args.file.name, "versions": versions})


def report(name: str, rows: list[QualityRow], settings: dict[str, Any]) -> None:
    """Print a table, and save it under a name."""
    print("\n".join(lines(rows)), f"\nexact perplexity {rows[0].divergence.exact_perplexity:.3f}")
    table = {name: {"divergence": asdict(found), "greedy": asdict(greedy)} for name, found, greedy in rows}
    settings |= {"num_positions": rows[0].divergence.num_positions}
    print(machine.save(name, {"settings": settings, "rows": table}))


if __name__ == "__main__":
    main()
