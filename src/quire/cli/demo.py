"""The demonstration: several conversations with the bundled model, served at once from paged memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from quire.cli.terminal.live_table import LiveTable, MemoryWatch
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.llm import LLM

SYSTEM = "You are Quire, a small model that ships with an engine for paged memory. Answer in short and simple words."
# The turns of each conversation; the prompt of the second turn contains the first.
CONVERSATIONS = (
    ("Tell me a story about a fox.", "Tell me another story."),
    ("What colour is a lemon?", "What is the opposite of hot?"),
    ("Where do penguins live?", "What do penguins eat?"),
    ("Who are you?", "What is Quire?"),
    ("Tell me a story about a little robot.", "Thank you!"),
    ("How many legs does a spider have?", "What is a spider?"),
    ("Write a poem about the sea.", "Tell me a story about a boat."),
    ("I am bored.", "Tell me a story about a dragon."),
)
BEGINNING = "Once upon a time, a fox lived in a den in the forest. One day she found an old boat by the river. The fox"
NUM_SAMPLES = 4
DEFAULT_MAX_TOKENS = 96
SHORT_MAX_TOKENS = 32


def run(llm: LLM, overrides: dict[str, Any]) -> int:
    """Run all conversations turn by turn, then several samples of one prompt; report the use of memory.

    Args:
        llm: engine with a chat model.
        overrides: sampling parameters that the user has set.
    """
    if overrides.get("n", 1) != 1:
        raise ConfigError("the demonstration chooses n itself; leave it out", field="n")
    if "beam_width" in overrides:
        raise ConfigError("the demonstration shows samples; leave beam_width out", field="beam_width")
    console = Console(highlight=False)
    params = replace(llm.get_default_sampling_params(), **{"max_tokens": DEFAULT_MAX_TOKENS, **overrides})
    for line in llm.resolved.lines():
        console.print(Text(line, style="dim"), soft_wrap=True)
    watch = MemoryWatch(llm)
    histories: list[list[dict[str, str]]] = [[{"role": "system", "content": SYSTEM}] for _ in CONVERSATIONS]
    for turn, remark in enumerate(("", "; the first turn is in the prefix cache")):
        questions = [conversation[turn] for conversation in CONVERSATIONS]
        for history, question in zip(histories, questions, strict=True):
            history.append({"role": "user", "content": question})
        _title(console, f"{len(questions)} conversations at once, turn {turn + 1}{remark}")
        table = LiveTable(questions, console)
        table.show(watch.over(llm.stream([llm.render_chat(history) for history in histories], params)))
        for history, row in zip(histories, table.rows, strict=True):
            history.append({"role": "assistant", "content": row.text})
    _title(console, f"One beginning, {NUM_SAMPLES} samples; they share its blocks until they differ")
    short = replace(params, n=NUM_SAMPLES, max_tokens=overrides.get("max_tokens", SHORT_MAX_TOKENS))
    LiveTable([BEGINNING], console, num_samples=NUM_SAMPLES).show(watch.over(llm.stream(BEGINNING, short)))
    console.print()
    for line in watch.lines():
        console.print(Text(line), soft_wrap=True)
    return 0


def _title(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))
