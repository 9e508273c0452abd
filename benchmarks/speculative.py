"""The gain and the cost of drafts: `python -m benchmarks.speculative`.

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
- **copy**: the greedy choice of a model that copies (`benchmarks.make_copier`), after a text and its first words.
  Another model than the others', so it is asked for alone; with the method "draft" a small one of its kind guesses.

Texts are words of this project's documentation, each word and sign a token.

Four cases are requests one after the other to one engine, where later outputs repeat pieces of earlier requests'
outputs. They show what drafts from earlier outputs ("suffix") gain over drafts from the sequence itself ("ngram"):

- **agents**: traces of coding agents (`benchmarks.agents`), dictated; prompts have no earlier output in them.
- **sessions**: the same outputs, dictated; prompts have the agent's session so far in them.
- **sources**: the first lines of modules of this package, dictated: what they repeat of each other is what code shares.
- **stories**: the greedy choice of the bundled model for up to 40 different openings of stories. Asked
  for alone.
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
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import agents, machine, make_copier, make_model
from quire import LLM, SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = machine.RESULTS / "speculative.json"
CASES = ("edit", "extract", "prose", "random", "loop")
COPY = "copy"
# Cases of requests one after the other.
STORIES, SOURCES = "stories", "sources"
# Whether the prompts of traces hold the session so far.
TRACES = {"agents": False, "sessions": True}
# For which another model than the others' is needed.
ALONE = (COPY, STORIES)
METHODS = ("off", "ngram", "suffix")
# Tokens of a text that begin a copy.
NUM_FIRST = 4
FIRST_ID, VOCAB_SIZE = 1000, 151_000
# Tokens that the longest prompt of a trace and its output have at most.
TRACE_LEN = 4096
NUM_STORIES, STORY_LEN = 40, 160
NAMES = ("Lily", "Tom", "Anna", "Ben", "Mia", "Max", "Sara", "Leo", "Emma", "Sam")
PLACES = ("park", "lake", "forest", "garden", "beach", "farm", "river", "market")
OPENINGS = ("Once upon a time, {} went to the {}", "One day, {} walked to the {}", "{} lived near a {}")


class Task(NamedTuple):
    """A prompt, and its continuation; None for the output of the model itself.

    With `ends`, a text of the model's own ends where the model ends it.
    """

    prompt: list[int]
    text: list[int] | None
    ends: bool = False


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


def requests(case: str, seed: int, num_sessions: int) -> list[Task]:
    """Return the requests of a case in which they come one after the other."""
    if case != STORIES:
        turns = agents.sources(seed, num_sessions)
        if case in TRACES:
            turns = agents.trace(seed, num_sessions, has_history=TRACES[case])
        return [Task(_tokens_of(turn.prompt), _tokens_of(turn.output)) for turn in turns]
    rng = random.Random(f"{case} {seed}")
    with closing(Tokenizer.from_folder(agents.PACKAGE / "models" / "bundled")) as tokenizer:
        texts = [rng.choice(OPENINGS).format(rng.choice(NAMES), rng.choice(PLACES)) for _ in range(NUM_STORIES)]
        return [Task(tokenizer.encode(text), None, ends=True) for text in dict.fromkeys(texts)]


def _tokens_of(text: str) -> list[int]:
    """Return code and JSON as token ids: one for each part of an identifier, sign, or new line with its indentation."""
    return [FIRST_ID + _hash(part) for part in re.findall(r"\n *|[A-Za-z0-9]+|\S", text)]


def edited(text: Sequence[int], rng: random.Random) -> list[int]:
    """Return a text with a word in 25 replaced, left out, or followed by a new one."""
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
    llm.reset_prefix_cache()
    return _serve(llm, tasks, num_new)


def serve_in_turn(llm: LLM, tasks: Sequence[Task], batch: int) -> dict[str, Any]:
    """Serve requests one batch after the other; return the sums of what `serve` returns."""
    llm.reset_prefix_cache()
    parts = [_serve(llm, tasks[start : start + batch], STORY_LEN) for start in range(0, len(tasks), batch)]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _serve(llm: LLM, tasks: Sequence[Task], num_new: int) -> dict[str, Any]:
    engine = llm.engine
    before = llm.stats
    for idx, (prompt, text, ends) in enumerate(tasks):
        count = num_new if text is None else len(text)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=not ends,
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
    cases = set(options.cases.split(","))
    max_model_len = 2 * (options.prompt + options.new)
    if cases & {STORIES, SOURCES, *TRACES}:
        max_model_len = 2 * STORY_LEN if STORIES in cases else TRACE_LEN
    return LLM(
        model,
        speculative_method=method,
        skip_tokenizer_init=True,
        num_threads=options.threads,
        max_num_seqs=max(options.batch, 1),
        max_model_len=max_model_len,
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
    parser.add_argument("--sessions", type=int, default=8, help="sessions of a trace of agents, or modules")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None)
    parser.add_argument("--save", action="store_true", help=f"add the rows to {RESULTS.name}")
    options = parser.parse_args()
    methods, cases = options.methods.split(","), options.cases.split(",")
    for alone in set(cases) & set(ALONE):
        if len(cases) > 1:
            parser.error(f"--cases: {alone!r} is for another model than the others, and is asked for alone")
    model = str(options.model or _own_model(cases[0]))
    llms = {method: load(method, model, options) for method in methods}
    rows: list[dict[str, Any]] = []
    for case in cases:
        for run, method in itertools.product(range(options.runs), methods):
            # Every run has texts of its own: suffixes of earlier runs are no help, as they would not be elsewhere.
            if case in (*TRACES, SOURCES, STORIES):
                figures = serve_in_turn(llms[method], requests(case, run, options.sessions), options.batch)
            else:
                seeds = range(run * options.batch, (run + 1) * options.batch)
                tasks = [task(case, options.prompt, options.new, seed) for seed in seeds]
                figures = serve(llms[method], tasks, options.new)
            rows.append({"case": case, "method": method, "batch": options.batch, "run": run, **figures})
        report(case, methods, rows, options.batch)
    if options.save:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
        settings = {name: vars(options)[name] for name in ("prompt", "new", "sessions", "threads")}
        known.append({**machine.facts(), **settings, "quantization": options.quantization, "rows": rows})
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _own_model(case: str) -> Path | str:
    """Return the model of a case."""
    if case == STORIES:
        return "bundled"
    return make_copier.ensure("qwen3-0.6b-copier") if case == COPY else make_model.ensure()


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
