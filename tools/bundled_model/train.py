"""Training of the bundled model from scratch: corpus, tokenizer, weights and files in one command.

Run it from the root of the repository, first for stories and conversations, then, with `--start` and `--skills`, for
tools and thinking (the card of the model has every command that made it)::

    python -m tools.bundled_model.train --out src/quire/models/bundled --tokens 12000000 --minutes 600
    python -m tools.bundled_model.train --start src/quire/models/bundled --out src/quire/models/bundled --skills 0.65 \
        --seed 17 --tokens 4000000 --rate 2e-3 --warm 80

A larger model of the same corpus, of 23 million parameters, to measure what quantisation costs one (no card of it is
written)::

    python -m tools.bundled_model.train --out .cache/bench/stories-23m --layers 8 --hidden 512 --inner 1280 \
        --batch 1024 --rate 1.5e-3 --warm 60 --tokens 3000000 --minutes 40
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from tools.bundled_model.card import TrainingRun, training_section, write_card
from tools.bundled_model.conversation import MARKERS, THINK
from tools.bundled_model.corpus import EOS
from tools.bundled_model.data import (
    TrainingBatch,
    encode,
    id_of,
    pack,
    schedule,
    to_batch,
    train_tokenizer,
    with_markers,
)
from tools.bundled_model.export import export
from tools.bundled_model.model import LlamaShape, SmallLlama
from tools.bundled_model.sample import load
from tools.bundled_model.skills import mixed_documents


@dataclass(frozen=True)
class Plan:
    """Hyperparameters of a training run.

    Attributes:
        seed: random seed.
        tokens: tokens of the corpus to train on, each seen once.
        batch: tokens per step.
        rate: highest learning rate.
        floor: last learning rate, as a part of the highest.
        warm: steps in which the learning rate rises.
        decay: weight decay of the matrices.
        minutes: time limit; the schedule of the learning rate follows it where it ends the training early.
        every: steps between two measurements on held-out text.
        skills: part of the documents that are about tools and thinking.
    """

    seed: int = 7
    tokens: int = 12_000_000
    batch: int = 2048
    rate: float = 2.5e-3
    floor: float = 0.02
    warm: int = 150
    decay: float = 0.05
    minutes: float = 600.0
    every: int = 250
    skills: float = 0.0


@dataclass(frozen=True)
class Result:
    """Result of a training run.

    Attributes:
        steps: number of steps.
        tokens: tokens seen, padding not counted.
        train_loss: mean loss of the last hundred steps.
        held_out_loss: loss on documents of another seed, without tools and thinking.
        held_out_skill_loss: loss on those with tools and thinking; None where the training has none.
        seconds: time of the training.
    """

    steps: int
    tokens: int
    train_loss: float
    held_out_loss: float
    held_out_skill_loss: float | None
    seconds: float


def loss_of(model: SmallLlama, batch: TrainingBatch) -> torch.Tensor:
    """Return the mean loss over the learned tokens.

    Args:
        model: model.
        batch: batch of rows.
    """
    # On a processor with AVX512-BF16 this is about 1.6 times as fast as plain float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch.inputs, batch.mask)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=-100)


@torch.no_grad()
def measure(model: SmallLlama, batches: list[TrainingBatch]) -> float:
    """Return the loss on held-out batches.

    Args:
        model: model.
        batches: held-out batches.

    Returns:
        The mean loss per learned token.
    """
    counts = [int((batch.targets >= 0).sum()) for batch in batches]
    losses = [loss_of(model, batch).item() * count for batch, count in zip(batches, counts, strict=True)]
    return sum(losses) / sum(counts)


def make_optimizer(model: SmallLlama, plan: Plan) -> torch.optim.AdamW:
    """Return the optimizer; norms and the embedding have no weight decay.

    Args:
        model: model.
        plan: hyperparameters.
    """
    named = list(model.named_parameters())
    kept = [weight for name, weight in named if weight.dim() < 2 or "embed" in name]
    decayed = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    groups = [{"params": decayed, "weight_decay": plan.decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), fused=True)


def rate_at(plan: Plan, step: int, progress: float) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine.

    Args:
        plan: hyperparameters.
        step: number of the step.
        progress: completed share of the run, from 0 to 1.
    """
    rise = min(1.0, (step + 1) / plan.warm)
    fall = plan.floor + (1 - plan.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return plan.rate * rise * fall


@torch.no_grad()
def forget_last_tokens(model: SmallLlama, count: int) -> None:
    """Give the last tokens the mean embedding, because they stand for something new.

    Args:
        model: model, changed in place.
        count: number of tokens.
    """
    embedding = model.model.embed_tokens.weight
    embedding[-count:] = embedding[:-count].mean(0)


def held_out(tokenizer: Tokenizer, plan: Plan, skills: float) -> list[TrainingBatch]:
    """Return batches of documents that the training does not use.

    Args:
        tokenizer: tokenizer of the model.
        plan: hyperparameters.
        skills: part of the documents that are about tools and thinking.
    """
    packed = pack(encode(tokenizer, mixed_documents(plan.seed + 2, skills), 120_000))
    pad = id_of(tokenizer, EOS)
    rows = schedule(packed, plan.batch, random.Random(plan.seed))
    return [to_batch(group, length, pad) for length, group in rows]


def train(model: SmallLlama, tokenizer: Tokenizer, plan: Plan, checkpoint: Path | None) -> Result:
    """Train the model.

    Args:
        model: model, changed in place.
        tokenizer: tokenizer of the model.
        plan: hyperparameters.
        checkpoint: folder of checkpoints during the training.

    Returns:
        Steps, tokens, losses and time.
    """
    encoded = encode(tokenizer, mixed_documents(plan.seed + 1, plan.skills), plan.tokens)
    batches = schedule(pack(encoded), plan.batch, random.Random(plan.seed))
    checks, pad = held_out(tokenizer, plan, 0.0), id_of(tokenizer, EOS)
    skill_checks = held_out(tokenizer, plan, 1.0) if plan.skills else []
    optimizer = make_optimizer(model, plan)
    recent: list[float] = []
    seen, begun = 0, time.monotonic()
    for step, (length, rows) in enumerate(batches):
        spent = time.monotonic() - begun
        progress = max(step / len(batches), spent / (60 * plan.minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(plan, step, progress)
        loss = loss_of(model, to_batch(rows, length, pad))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], loss.item()]
        seen += sum(len(row.ids) for row in rows)
        if step % 50 == 49:
            mean, pace = sum(recent[-50:]) / 50, seen / (time.monotonic() - begun)
            print(
                f"step {step + 1}/{len(batches)} loss {mean:.4f} tokens/s {pace:.0f} progress {progress:.3f}",
                flush=True,
            )
        if checkpoint and step % plan.every == plan.every - 1:
            print(f"held-out loss {measure(model, checks[:8]):.4f}", flush=True)
            if skill_checks:
                print(f"held-out loss of tools and thinking {measure(model, skill_checks[:8]):.4f}", flush=True)
            export(model, tokenizer, checkpoint)
    seconds = time.monotonic() - begun
    skill_loss = measure(model, skill_checks) if skill_checks else None
    return Result(step + 1, seen, sum(recent) / len(recent), measure(model, checks), skill_loss, seconds)


def main() -> None:
    """Train the tokenizer and the model, and write the folder of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--checkpoint", type=Path, help="folder of the unfinished model")
    parser.add_argument("--tokens", type=int, default=Plan.tokens)
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="longest time for the training")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="highest learning rate")
    parser.add_argument("--warm", type=int, default=Plan.warm, help="steps in which the learning rate rises")
    parser.add_argument("--batch", type=int, default=Plan.batch, help="tokens per step")
    parser.add_argument("--layers", type=int, default=LlamaShape.layers)
    parser.add_argument("--hidden", type=int, default=LlamaShape.hidden, help="width of the residual stream")
    parser.add_argument("--inner", type=int, default=LlamaShape.inner, help="width of the feed-forward part")
    parser.add_argument("--start", type=Path, help="model folder to go on from; without it, all is made anew")
    parser.add_argument(
        "--skills", type=float, default=Plan.skills, help="part of the documents with tools or thinking"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--machine", default="one thread of a 2-core x86 server", help="what the card calls the machine"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    names = ("seed", "tokens", "batch", "rate", "warm", "minutes", "skills")
    plan = Plan(**{name: getattr(options, name) for name in names})
    if options.start:
        model, tokenizer = load(options.start)
        model.train()
        if options.skills and tokenizer.token_to_id(THINK) is None:
            tokenizer = with_markers(tokenizer)
            forget_last_tokens(model, len(MARKERS))
    else:
        model = SmallLlama(LlamaShape(hidden=options.hidden, layers=options.layers, inner=options.inner))
        tokenizer = train_tokenizer(plan.seed, 20_000, model.shape.vocab)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count} parameters", flush=True)
    result = train(model, tokenizer, plan, options.checkpoint)
    export(model, tokenizer, options.out)
    print(json.dumps(asdict(result)), flush=True)
    if model.shape != LlamaShape():
        return
    command = shlex.join(["python", "-m", "tools.bundled_model.train", *sys.argv[1:]])
    earlier = training_section(options.start) if options.start else ""
    write_card(options.out, TrainingRun(command=command, machine=options.machine, **asdict(result)), earlier)


if __name__ == "__main__":
    main()
