"""What drafts gain and cost: `python -m benchmarks.speculative`.

One stream on a checkpoint with the shape of Qwen3-0.6B and random weights, with and without drafts, in turns. Random
weights say nothing that copies a prompt, so in most cases the text is dictated: a logits processor leaves the one
token that the text has next, with drafts as without. The work of a step is what it always is, and so is a draft's
chance to be right; the processor's own time (0.1 to 0.2 ms a row) is paid on both sides. Nothing is dictated in
"loop" and "copy".

- **edit**: the prompt again, with a word in 25 replaced, left out or added.
- **extract**: sentences of the prompt in another order, with words between them that are nowhere else.
- **prose**: another text than the prompt, of the same author; what few words it repeats go on otherwise.
- **random**: tokens that nothing foretells.
- **loop**: the greedy choice of the model, which soon repeats itself.
- **copy**: the greedy choice of a model that copies (`benchmarks.make_copier`), behind a text and its first words.
  Another model than the others', so it is asked for alone; with the method "draft" a small one of its kind guesses.

Texts are words of this project's documentation, each word and sign a token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine, make_copier, make_model
from quire import LLM, SamplingParams

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = machine.RESULTS / "speculative.json"
CASES = ("edit", "extract", "prose", "random", "loop")
COPY = "copy"
METHODS = ("off", "ngram", "suffix")
# Of a text, to begin a copy with.
NUM_FIRST = 4
FIRST_ID, VOCAB_SIZE = 1000, 151_000


class Task(NamedTuple):
    """A prompt, and the text that comes behind it; None for what the model says itself."""

    prompt: list[int]
    text: list[int] | None


def words_of(name: str) -> list[int]:
    """Return a page of the documentation as token ids: one for each word or sign."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return [FIRST_ID + _hash(word) for word in re.findall(r"\w+|[^\w\s]", text)]


def _hash(word: str) -> int:
    """Return a number for a word, the same in every process."""
    value = 0
    for byte in word.encode():
        value = (value * 257 + byte) % 149_969
    return value


def task(case: str, num_prompt: int, num_new: int, seed: int) -> Task:
    """Return one request of a case."""
    rng = random.Random(f"{case} {seed}")
    page = words_of("architecture.md")
    start = rng.randrange(len(page) - num_prompt)
    prompt = page[start : start + num_prompt]
    match case:
        case "edit":
            return Task(prompt, edited(prompt, rng)[:num_new])
        case "extract":
            return Task(prompt, extracted(prompt, rng, num_new))
        case "prose":
            other = words_of("memory/prefix-cache.md")
            start = rng.randrange(len(other) - num_new)
            return Task(prompt, other[start : start + num_new])
        case "random":
            return Task(prompt, [rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(num_new)])
        case "copy":
            return Task(prompt[:-NUM_FIRST] + prompt[:NUM_FIRST], None)
        case _:
            return Task(prompt, None)


def edited(text: Sequence[int], rng: random.Random) -> list[int]:
    """Return a text with a word in 25 replaced, left out, or with one behind it that is new."""
    new: list[int] = []
    for word in text:
        other = rng.randrange(FIRST_ID, VOCAB_SIZE)
        new += [word] if rng.random() >= 1 / 25 else rng.choice(([other], [], [word, other]))
    return new


def extracted(text: Sequence[int], rng: random.Random, num_new: int) -> list[int]:
    """Return parts of a text, 15 to 40 words each, with three to eight new words between them."""
    new: list[int] = []
    while len(new) < num_new:
        new += [rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(rng.randrange(3, 9))]
        start = rng.randrange(len(text) - 40)
        new += text[start : start + rng.randrange(15, 41)]
    return new[:num_new]


def dictated(text: Sequence[int]) -> Callable[[list[int], list[int], torch.Tensor], torch.Tensor]:
    """Return a logits processor that leaves the next token of a text, and nothing else."""

    def leave(_: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        next_id = text[min(len(output), len(text) - 1)]
        value = logits[next_id].item()
        logits.fill_(-torch.inf)
        logits[next_id] = value
        return logits

    return leave


def serve(llm: LLM, tasks: Sequence[Task], num_new: int) -> dict[str, Any]:
    """Serve requests together; return the seconds from the first token on, steps, and what became of drafts."""
    engine = llm.engine
    llm.reset_prefix_cache()
    before = llm.stats
    for idx, (prompt, text) in enumerate(tasks):
        count = num_new if text is None else len(text)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logits_processors=() if text is None else (dictated(text),),
        )
        engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
    waiting = {str(idx) for idx in range(len(tasks))}
    while waiting:
        waiting -= {news.request_id for news in engine.step()}
    started_s, started = time.perf_counter(), llm.stats
    while engine.has_unfinished:
        engine.step()
    elapsed_s, after = time.perf_counter() - started_s, llm.stats
    return {
        "seconds": elapsed_s,
        "tokens": after.generation_tokens - started.generation_tokens,
        "steps": after.num_steps - started.num_steps,
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
    }


def load(method: str, model: str, options: argparse.Namespace) -> LLM:
    """Load the model with a method."""
    return LLM(
        model,
        speculative_method=method,
        skip_tokenizer_init=True,
        num_threads=options.threads,
        max_num_seqs=max(options.batch, 1),
        max_model_len=2 * (options.prompt + options.new),
        kv_cache_memory_bytes=1 << 30,
        quantization=options.quantization,
        draft_model=str(make_copier.ensure("qwen3-0.6b-copier-draft")) if method == "draft" else None,
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint folder; written where there is none")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None)
    parser.add_argument("--save", action="store_true", help=f"add the rows to {RESULTS.name}")
    options = parser.parse_args()
    methods, cases = options.methods.split(","), options.cases.split(",")
    if COPY in cases and len(cases) > 1:
        parser.error(f"--cases: {COPY!r} is for another model than the others, and is asked for alone")
    own_model = make_copier.ensure("qwen3-0.6b-copier") if COPY in cases else make_model.ensure()
    model = str(options.model or own_model)
    llms = {method: load(method, model, options) for method in methods}
    rows: list[dict[str, Any]] = []
    for case in cases:
        for run, method in itertools.product(range(options.runs), methods):
            # Every run has texts of its own: suffixes of earlier runs are no help, as they would not be elsewhere.
            tasks = [task(case, options.prompt, options.new, run * options.batch + i) for i in range(options.batch)]
            figures = serve(llms[method], tasks, options.new)
            rows.append({"case": case, "method": method, "batch": options.batch, "run": run, **figures})
        report(case, methods, rows, options.batch)
    if options.save:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
        settings = {"prompt": options.prompt, "new": options.new, "threads": options.threads}
        known.append({**machine.facts(), **settings, "quantization": options.quantization, "rows": rows})
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def report(case: str, methods: Sequence[str], rows: Sequence[dict[str, Any]], batch: int) -> None:
    """Print what a case gave."""
    for method in methods:
        mine = [row for row in rows if (row["case"], row["method"]) == (case, method)]
        base = [row for row in rows if (row["case"], row["method"]) == (case, methods[0])]
        # Run by run, so that what else the machine does falls on both.
        gains = [
            (mine_one["tokens"] / mine_one["seconds"]) / (base_one["tokens"] / base_one["seconds"])
            for mine_one, base_one in zip(mine, base, strict=True)
        ]
        rate = statistics.median(row["tokens"] / row["seconds"] for row in mine)
        drafted, accepted = (sum(row[name] for row in mine) for name in ("drafted", "accepted"))
        tokens, steps = (sum(row[name] for row in mine) for name in ("tokens", "steps"))
        print(
            f"{case:8} {method:7} batch {batch:2}  {rate:7.1f} tokens/s  {statistics.median(gains):5.2f}x "
            f"({min(gains):.2f} to {max(gains):.2f})  {tokens / steps:5.2f} tokens a step  "
            f"accepted {accepted}/{drafted}",
            flush=True,
        )


if __name__ == "__main__":
    main()
