"""The cost of structured outputs per step, and the time that forced tokens save: `python -m benchmarks.structured`.

The same prompts are decoded with and without a form, in turns, in one engine. Forms that force nothing give steps of
one row a sequence, which are compared with steps of free sequences. What forced tokens spare is measured on records
with long names: once as they come, once with the tokens drawn one by one.

A checkpoint with random weights has no tokenizer. One of 151,643 tokens is made of the Python sources in the
environment, which takes a minute, and kept.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import machine, make_model
from benchmarks.serving import BLOCK_SIZE
from quire import LLM, SamplingParams
from quire.engine.engine import Engine

VOCAB_SIZE = 151_643
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen's: words with the sign before them, single digits, runs of signs, line ends.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_PROMPT = 128
BATCH = 16
# None of these forces a token, and none can end within the tokens that are measured.
VALUES = [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"type": "integer"}}]
LINES = 'start: line{500}\nline: WORD ("=" | " ") (WORD | NUMBER) ";"?\nWORD: /[a-z]+/\nNUMBER: /[0-9]+/'
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "array", "items": {"anyOf": VALUES}, "minItems": 500}},
    "regex": {"regex": r"([A-Za-z]+[,.]? )*~~~~"},
    # Each word leads to a state of its own, so no mask is known before it is asked for.
    "repetition": {"regex": r"([A-Za-z]+[,.]? ){500}"},
    "grammar": {"grammar": LINES},
}
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "transaction_identifier": {"type": "string", "pattern": "^[0-9a-f]{8}$"},
        "customer_account_number": {"type": "integer", "minimum": 100000, "maximum": 999999},
        "shipping_address_country": {"enum": ["Norway", "Portugal", "Japan", "Argentina"]},
        "is_express_delivery_requested": {"type": "boolean"},
        "preferred_payment_method": {"enum": ["credit_card", "bank_transfer", "direct_debit"]},
        "line_items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "product_description": {"enum": ["garden chair", "reading lamp", "coffee table"]},
                    "quantity_ordered": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit_price_in_cents": {"type": "integer", "minimum": 100, "maximum": 99999},
                },
                "required": ["product_description", "quantity_ordered", "unit_price_in_cents"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])


def ensure_tokenizer(folder: Path) -> Path:
    """Return the folder of a tokenizer of the size of Qwen3's, made first where it is missing."""
    file = folder / "tokenizer.json"
    if not file.exists():
        print(f"making a tokenizer in {folder}", flush=True)
        library = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PIECES), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        library.decoder = decoders.ByteLevel()
        sources = sorted(str(path) for path in Path(sysconfig.get_path("purelib")).rglob("*.py"))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        library.train(
            sources, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
        )
        library.add_special_tokens(SPECIAL)
        folder.mkdir(parents=True, exist_ok=True)
        library.save(str(file))
    return folder


def prompts(num: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = random.Random(0)
    return [[rng.randrange(1000, 100_000) for _ in range(NUM_PROMPT)] for _ in range(num)]


def step_s(engine: Engine, params: SamplingParams, num_steps: int) -> float:
    """Return the median seconds of a step in which all sequences decode, one row each."""
    for idx, prompt in enumerate(prompts(BATCH)):
        engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
    waiting = {str(idx) for idx in range(BATCH)}
    while waiting:
        waiting -= {news.request_id for news in engine.step()}
    steps = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        news = engine.step()
        steps.append(time.perf_counter() - started_s)
        if [len(output.outputs[0].token_ids) for output in news] != [1] * BATCH:
            raise RuntimeError("a step did not give each sequence one token")
    for idx in range(BATCH):
        engine.abort_request(str(idx))
    return statistics.median(steps)


def overhead(engine: Engine, temperature: float, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Return, for each form, the seconds of a step with it and of the free steps before and behind it."""
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": 4 * num_steps, "seed": 1, "detokenize": False}
    free = SamplingParams(**common, ignore_eos=True)
    rows = []
    for name, form in FORMS.items():
        bound = SamplingParams(**common, structured_outputs=form)  # type: ignore[arg-type]
        step_s(engine, bound, 4)  # compiles
        times = []
        before = step_s(engine, free, num_steps)
        for _ in range(rounds):
            with_form = step_s(engine, bound, num_steps)
            behind = step_s(engine, free, num_steps)
            times.append((with_form, (before + behind) / 2))
            before = behind
        ratio = statistics.median(mine / other for mine, other in times)
        mine_s, free_s = (statistics.median(column) for column in zip(*times, strict=True))
        row = {"form": name, "temperature": temperature, "step_s": mine_s, "free_step_s": free_s, "ratio": ratio}
        rows.append({**row, "rounds": times})
        shown = f"{mine_s * 1e3:7.2f} ms a step, free {free_s * 1e3:7.2f} ms: {100 * (ratio - 1):+.2f} %"
        print(f"{name:8} temperature {temperature}: {shown}", flush=True)
    return rows


def records(engine: Engine, batch: int, *, is_appending: bool) -> dict[str, float]:
    """Return seconds, steps and tokens of a batch of records."""
    common: dict[str, Any] = {"temperature": 0.8, "max_tokens": 400, "detokenize": False}
    form = {"json": RECORD, "disable_any_whitespace": True}
    # A stop token that may not come yet might be what is forced, so then all tokens are drawn.
    drawn = {} if is_appending else {"min_tokens": 1, "stop_token_ids": [VOCAB_SIZE]}
    num_steps, num_tokens = engine.num_steps, engine.stats.generation_tokens
    started_s = time.perf_counter()
    for idx, prompt in enumerate(prompts(batch)):
        params = SamplingParams(**common, **drawn, seed=idx, structured_outputs=form)  # type: ignore[arg-type]
        engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished:
        for news in engine.step():
            if news.error is not None or (news.finished and news.outputs[0].finish_reason != "stop"):
                raise RuntimeError(news.error or "a record did not end")
    seconds = time.perf_counter() - started_s
    return {
        "seconds": seconds,
        "steps": engine.num_steps - num_steps,
        "tokens": engine.stats.generation_tokens - num_tokens,
    }


def gain(engine: Engine, rounds: int) -> list[dict[str, Any]]:
    """Return, for each batch, what records take with forced tokens appended, and with all tokens drawn."""
    rows = []
    for batch in (1, BATCH):
        records(engine, batch, is_appending=True)  # prompts are in the prefix cache from here on
        pairs = [
            (records(engine, batch, is_appending=True), records(engine, batch, is_appending=False))
            for _ in range(rounds)
        ]
        ratio = statistics.median(drawn["seconds"] / appended["seconds"] for appended, drawn in pairs)
        rows.append({"batch": batch, "ratio": ratio, "rounds": pairs})
        appended, drawn = pairs[0]
        if appended["tokens"] != drawn["tokens"]:
            raise RuntimeError(f"{appended['tokens']} tokens with those that are forced, {drawn['tokens']} without")
        print(
            f"batch {batch:2}: {appended['tokens']:.0f} tokens in {appended['steps']:.0f} steps instead of "
            f"{drawn['steps']:.0f}, {ratio:.2f} times faster",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="of a round")
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint folder; default: a random one")
    parser.add_argument("--tokenizer", type=Path, default=make_model.FOLDER / "tokenizer", help="a folder; made there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--only", choices=("overhead", "gain"), default=None)
    parser.add_argument("--name", default="structured", help="the name of the file under results/")
    options = parser.parse_args()
    model = make_model.ensure() if options.model is None else options.model
    engine = LLM(
        model=str(model),
        tokenizer=str(ensure_tokenizer(options.tokenizer)),
        dtype="bfloat16",
        device=options.device,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_kv_blocks=20_480 // BLOCK_SIZE,
        max_num_seqs=BATCH,
        num_threads=options.threads,
    ).engine
    data: dict[str, Any] = {"batch": BATCH, "threads": options.threads, "device": options.device, "model": model.name}
    # With no more cores than threads, masks are filled before the model runs.
    data["cores"] = len(os.sched_getaffinity(0))
    if options.only != "gain":
        data["overhead"] = [
            row
            for temperature in options.temperatures
            for row in overhead(engine, temperature, options.rounds, options.steps)
        ]
    if options.only != "overhead":
        data["gain"] = gain(engine, options.rounds)
    engine.close()
    print(machine.save(options.name, data))


if __name__ == "__main__":
    main()
