"""Model card of the bundled model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.bundled_model.corpus import ASSISTANT, BOS, END, USER
from tools.bundled_model.sample import QUESTIONS, STORIES, load, write

TEXT = """# The bundled model of Quire

A very small language model that ships with Quire, so that the engine can be tried, tested and measured
without a download. It writes small English stories and answers simple questions. Everything about it was made
by the scripts in `tools/bundled_model`: the corpus (an original, seeded grammar, no text of others), the
tokenizer and the weights.

| | |
|---|---|
| Form | Llama: {layers} layers, width {hidden}, {heads} query and {kv_heads} key-value heads, inner width {inner} |
| Parameters | {parameters:,}, with tied embeddings, stored in bfloat16 |
| Tokenizer | byte-level BPE, {vocab:,} tokens, all 256 bytes among them, so any UTF-8 text comes back unchanged |
| Longest sequence | {positions:,} tokens |
| End of text | `<|eos|>` after a story, `<|end|>` after a turn of a chat |
| Licence | that of Quire |

## Training

```
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

{note}Only stories, facts and the assistant's turns count in the loss, not what the user says. The losses are in nats
per token. Much of what is left is the free choice of names, things and events in the corpus, which nobody can
foresee. The tokenizer and the corpus are the same on every machine; the weights are the same for the same seed,
thread count, processor and version of torch, as long as a limit given with `--minutes` does not end the run early.

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
"""


@dataclass(frozen=True)
class TrainingRun:
    """Facts about the training for the card.

    Attributes:
        command: command line of the training.
        machine: description of the machine.
        steps: number of steps.
        tokens: number of tokens seen.
        train_loss: mean loss at the end.
        held_out_loss: loss on other documents.
        seconds: duration of the training.
        note: further remarks.
    """

    command: str
    machine: str
    steps: int
    tokens: int
    train_loss: float
    held_out_loss: float
    seconds: float
    note: str = ""


def write_card(folder: Path, run: TrainingRun) -> None:
    """Write the card into a finished model folder.

    Args:
        folder: folder of the model.
        run: facts about the training.
    """
    model, tokenizer = load(folder)
    samples = [f"> **{text}**{write(model, tokenizer, BOS + text)}" for text in STORIES]
    prompts = {text: f"{BOS}{USER}{text}{END}{ASSISTANT}" for text in QUESTIONS}
    samples += [f"> **User:** {text}\n>\n> {write(model, tokenizer, prompt)}" for text, prompt in prompts.items()]
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
        command=run.command,
        machine=run.machine,
        note=f"{run.note}\n\n" if run.note else "",
        minutes=run.seconds / 60,
        pace=run.tokens / run.seconds,
        tokens=run.tokens,
        steps=run.steps,
        train_loss=run.train_loss,
        held_out_loss=run.held_out_loss,
        samples="\n\n".join(samples),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
