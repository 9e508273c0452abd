"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import sys
from typing import Any

from quire.engine.outputs.outputs import RequestOutput


class ProgressBar:
    """A progress bar over finished sequences, or nothing."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: Any = None
        self._num_tokens = 0
        self._task: Any = None
        # Standard output is the program's own; without a terminal, a bar is noise.
        if is_shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("Generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[num_tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int) -> None:
        """Start the bar with the number of sequences."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, num_tokens=0)

    def advance(self, ended: RequestOutput) -> None:
        """Add the output of a request that has ended."""
        if self._bar is not None:
            self._num_tokens += sum(len(output.token_ids) for output in ended.outputs)
            finished = sum(output.finished for output in ended.outputs)
            self._bar.update(self._task, advance=finished, num_tokens=self._num_tokens)
