"""Model card of the bundled model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from tokenizers import Tokenizer

from tools.bundled_model.conversation import END_THINK, prompt_of, signature
from tools.bundled_model.corpus import BOS
from tools.bundled_model.model import SmallLlama
from tools.bundled_model.sample import (
    QUESTIONS,
    STORIES,
    THOUGHTFUL,
    TOOL_CITY,
    TOOL_QUESTION,
    TOOL_RESULT,
    TOOLS,
    WEATHER,
    load,
    write,
)

TEXT = """# The bundled model of Quire

A very small language model that ships with Quire, so that the engine can be tried, tested and measured
without a download. It writes small English stories, answers simple questions, calls tools and, on request, thinks
before it answers. Everything about it was made by the scripts in `tools/bundled_model`: the corpus (an original,
seeded grammar, no text of others), the tokenizer and the weights.

| | |
|---|---|
| Form | Llama: {layers} layers, width {hidden}, {heads} query and {kv_heads} key-value heads, inner width {inner} |
| Parameters | {parameters:,}, with tied embeddings, stored in bfloat16 |
| Tokenizer | byte-level BPE, {vocab:,} tokens, all 256 bytes among them, so any UTF-8 text comes back unchanged |
| Longest sequence | {positions:,} tokens |
| End of text | `<|eos|>` after a story, `<|end|>` after a turn of a chat |
| Tokens of tools and thinking | the last six, in the place of the last six merges of the first training's tokenizer |
| Tools | listed as signatures after `<|tools|>`, called in Hermes' format, results in the role `tool` |
| Thinking | between `<think>` and `</think>`, where the template's `enable_thinking` is true; not by default |
| Licence | that of Quire |

## Training

{training}{losses}
## Samples

The best token at every step (temperature 0), as the files here give it in float32:

{samples}

## Limits

* It knows some hundred facts and the words of its small grammar, and nothing else. Outside of that it says that it
  does not know, or it makes things up.
* It speaks simple English only. Other languages and scripts pass through the tokenizer, but the model cannot
  write them.
* It mixes things up: now and then a story changes a name or a colour on the way, rarer subjects and a plot that
  was asked for can get lost, names it has not read in training are not kept, and some facts are told of the wrong
  animal. A low temperature (0 to 0.5) helps.
* Its stories follow a few plots. Long ones go from one small adventure to the next.
* Sums are learned for the numbers from zero to ten.
* Texts of more than about 250 tokens were a small part of the training, and there was none above 1,024.
* It has seen tools for the weather, the time, sums, animals, timers, messages, lights, notes and the day, and such
  that look up one fact; with others, more than four at a time, or values of a kind that it has not seen, it calls the
  wrong tool or spells a value wrongly. Its thoughts are short and change its answers little.
"""

RUN = """```
{command}
```

| | |
|---|---|
| Machine | {machine} |
| Time | {minutes:.1f} minutes, {pace:,.0f} tokens per second |
| Tokens seen | {tokens:,}, each document once, in {steps:,} steps of about 2,048 tokens |
| Sequences | whole documents packed into rows of 256, 512 and 1,024 tokens, hidden from each other |
| Final training loss | {train_loss:.4f} (mean of the last 100 steps) |
| Held-out loss | {held_out_loss:.4f} (documents of another seed) |
{skill_row}{note}"""

CONTINUED = """
### Continued, with tools and thinking

The training went on from the weights above.

"""
LOSSES = """
Only stories, facts and the assistant's turns count in the loss, not what the user says. The losses are in nats
per token. Much of what is left is the free choice of names, things and events in the corpus, which nobody can
foresee. The tokenizer and the corpus are the same on every machine; the weights are the same for the same seed,
thread count, processor and version of torch, as long as a limit given with `--minutes` does not end the run early.
"""
SECTION = re.compile(r"^## Training\n\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class TrainingRun:
    """Facts about the training for the card.

    Attributes:
        command: command line of the training.
        machine: description of the machine.
        steps: number of steps.
        tokens: number of tokens seen.
        train_loss: mean loss at the end.
        held_out_loss: loss on other documents, without tools and thinking.
        held_out_skill_loss: loss on those with tools and thinking; None where the training has none.
        seconds: duration of the training.
        note: further remarks.
    """

    command: str
    machine: str
    steps: int
    tokens: int
    train_loss: float
    held_out_loss: float
    held_out_skill_loss: float | None
    seconds: float
    note: str = ""


def training_section(folder: Path) -> str:
    """Return what the card of a model says about its training; "" where there is no card.

    Args:
        folder: folder of the model.
    """
    card = folder / "README.md"
    found = SECTION.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    return found[1].removesuffix(f"{LOSSES}\n") if found else ""


def run_text(run: TrainingRun) -> str:
    """Return the text of one training run.

    Args:
        run: facts about the training.
    """
    skills = run.held_out_skill_loss
    return RUN.format(
        command=" \\\n    ".join(wrap(run.command, 110, break_on_hyphens=False)),
        machine=run.machine,
        note=f"\n{run.note}\n" if run.note else "",
        minutes=run.seconds / 60,
        pace=run.tokens / run.seconds,
        tokens=run.tokens,
        steps=run.steps,
        train_loss=run.train_loss,
        held_out_loss=run.held_out_loss,
        skill_row="" if skills is None else f"| Held-out loss with tools and thinking | {skills:.4f} |\n",
    )


def write_card(folder: Path, run: TrainingRun, earlier: str = "") -> None:
    """Write the card into a finished model folder.

    Args:
        folder: folder of the model.
        run: facts about the training.
        earlier: text about the training that this one continues; "" for none.
    """
    model, tokenizer = load(folder)
    samples = [quoted(f"**{text}**{write(model, tokenizer, BOS + text)}") for text in STORIES]
    samples += [quoted(f"**User:** {text}", write(model, tokenizer, prompt_of(asked(text)))) for text in QUESTIONS]
    if run.held_out_skill_loss is not None:
        samples += skill_samples(model, tokenizer)
    shape = model.shape
    card = TEXT.format(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.inner,
        vocab=shape.vocab,
        positions=shape.positions,
        parameters=sum(weight.numel() for weight in model.parameters()),
        training=f"{earlier}{CONTINUED}{run_text(run)}" if earlier else run_text(run),
        losses=LOSSES,
        samples="\n\n".join(samples),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def skill_samples(model: SmallLlama, tokenizer: Tokenizer) -> list[str]:
    """Return samples with thinking and with a tool.

    Args:
        model: trained model.
        tokenizer: tokenizer of the model.
    """
    samples = []
    for text in THOUGHTFUL:
        said = write(model, tokenizer, prompt_of(asked(text), is_thinking=True))
        thought, _, answer = said.partition(END_THINK)
        samples.append(quoted(f"**User:** {text}", f"*{thought}*", answer))
    messages = asked(TOOL_QUESTION)
    said = write(model, tokenizer, prompt_of(messages, TOOLS))
    called = {"type": "function", "function": {"name": WEATHER["name"], "arguments": {"city": TOOL_CITY}}}
    messages += [{"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "tool", "content": TOOL_RESULT}]
    answer = write(model, tokenizer, prompt_of(messages, TOOLS))
    call = f"`{said}`".replace("\n", " ")
    turns = f"**Tools:** {signature(TOOLS[0])}", f"**User:** {TOOL_QUESTION}", call, f"**Tool:** {TOOL_RESULT}", answer
    return [*samples, quoted(*turns)]


def quoted(*paragraphs: str) -> str:
    """Return paragraphs as a quotation in Markdown, in lines of at most 120 columns."""
    return "\n>\n".join(fill(text, 120, initial_indent="> ", subsequent_indent="> ") for text in paragraphs)


def asked(text: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation that begins with a question."""
    return [{"role": "user", "content": text}]
