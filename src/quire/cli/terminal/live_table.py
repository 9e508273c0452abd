"""The live table of a run, with a row for each sequence, and a summary of the use of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.engine.outputs.outputs import RequestOutput

if TYPE_CHECKING:
    from quire.engine.llm import LLM

FRAME_S = 0.08
MAX_LABEL_WIDTH = 32
# Control characters that a terminal would execute.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return a text without control characters, except line breaks and tabs."""
    return text.translate(CONTROLS)


@dataclass(slots=True)
class TableRow:
    """The row of one sequence.

    Args:
        label: short form of the prompt.
        text: output so far.
        num_prompt: number of prompt tokens.
        num_cached: number of prompt tokens from the prefix cache.
        num_tokens: number of output tokens so far.
        is_finished: True if the sequence has ended.
    """

    label: str
    text: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    is_finished: bool = False

    @property
    def state(self) -> str:
        """The state of the sequence: "waits", "runs" or "done"."""
        if self.is_finished:
            return "done"
        return "runs" if self.num_tokens else "waits"


class LiveTable:
    """A table of the sequences of one run, updated while they are generated."""

    def __init__(self, labels: Sequence[str], console: Console, *, num_samples: int = 1) -> None:
        self.rows = [TableRow(" ".join(printable(label).split())) for label in labels for _ in range(num_samples)]
        self._num_samples = num_samples
        self._console = console

    def show(self, deltas: Iterable[RequestOutput]) -> None:
        """Show a run from its first delta to its last."""
        if not self._console.is_terminal:
            for delta in deltas:
                for row in self.add(delta):
                    if row.is_finished:
                        self._console.print(self._lines(row), soft_wrap=True)
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            shown_s = 0.0
            for delta in deltas:
                self.add(delta)
                # Drawing costs as much as a small model's step, so the frame rate is limited.
                if time.monotonic() - shown_s > FRAME_S:
                    live.update(self._table(is_final=False), refresh=True)
                    shown_s = time.monotonic()
        self._console.print(self._table(is_final=True))

    def add(self, delta: RequestOutput) -> list[TableRow]:
        """Add a delta of one request, and return the changed rows."""
        changed = []
        for output in delta.outputs:
            row = self.rows[int(delta.request_id) * self._num_samples + output.index]
            row.num_prompt = len(delta.prompt_token_ids)
            row.num_cached = delta.num_cached_tokens
            row.num_tokens += len(output.token_ids)
            row.text += printable(output.text)
            row.is_finished = output.finished
            changed.append(row)
        return changed

    def _table(self, *, is_final: bool) -> Table:
        table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
        label_width = min(MAX_LABEL_WIDTH, max(len(row.label) for row in self.rows))
        table.add_column("prompt", width=label_width, no_wrap=not is_final, overflow="ellipsis", style="cyan")
        table.add_column("text", ratio=1, no_wrap=not is_final, overflow="fold")
        for title, width in (("cached", 9), ("new", 4), ("", 5)):
            table.add_column(title, justify="right", width=width, no_wrap=True)
        # The rest of the width; a running sequence shows the end of its text.
        text_width = max(1, self._console.width - label_width - 9 - 4 - 5 - 4)
        for row in self.rows:
            line = " ".join(row.text.split())
            text = Text(line if is_final else line[-text_width:], style="" if row.is_finished else "bold")
            cached = Text(f"{row.num_cached}/{row.num_prompt}", style="green" if row.num_cached else "dim")
            table.add_row(Text(row.label), text, cached, str(row.num_tokens), Text(row.state, style="dim"))
        return table

    def _lines(self, row: TableRow) -> Group:
        counts = f"  ({row.num_tokens} tokens; {row.num_cached} of {row.num_prompt} prompt tokens cached)"
        return Group(Text(f"> {row.label}"), Text(f"  {' '.join(row.text.split())}"), Text(counts, style="dim"))


class MemoryWatch:
    """A summary of an engine's memory use over one run."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._start_s = time.perf_counter()
        self._before = llm.stats
        self.peak_blocks = 0

    def over(self, deltas: Iterable[RequestOutput]) -> Iterable[RequestOutput]:
        """Pass deltas on, and record the peak of the blocks in use."""
        for delta in deltas:
            self.peak_blocks = max(self.peak_blocks, self._llm.usage().used)
            yield delta

    def lines(self) -> list[str]:
        """Return the summary in three lines."""
        seconds = time.perf_counter() - self._start_s
        now, before, usage = self._llm.stats, self._before, self._llm.usage()
        generated = now.generation_tokens - before.generation_tokens
        queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
        preempted = now.num_preemptions - before.num_preemptions
        share = f" ({hits / queries:.0%})" if queries else ""
        evicted, copied = now.num_evictions - before.num_evictions, now.num_copies - before.num_copies
        merged = now.num_merges - before.num_merges
        return [
            f"{generated:,} tokens in {now.num_steps - before.num_steps:,} steps and {seconds:.2f} s: "
            f"{generated / seconds:,.0f} tokens/s",
            f"KV blocks: at most {self.peak_blocks:,} of {usage.num_blocks:,} in use; {merged} equal ones merged, "
            f"{copied} copied on write, {evicted} evicted, {usage.idle:,} kept for reuse; {preempted} preemptions",
            f"Prefix cache: {hits:,} of {queries:,} prompt tokens were there already{share}",
        ]
