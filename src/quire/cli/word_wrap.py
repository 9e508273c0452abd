"""Text for a terminal as it is generated, broken between words at the edge."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TextIO

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


def in_lines(text: str) -> str:
    """Return a text whose lines are broken between words at the edge of the terminal."""
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())


class WordWrap:
    """Writes text in pieces of any length; a word that does not fit into its line begins the next one.

    A word is held back until a space, a line break or the end follows it, so that it is never broken, unless it is
    longer than a line. Characters are counted as one column each.

    Args:
        stream: terminal.
        width: columns of a line; None takes the terminal's, at each word.
    """

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._stream = stream
        self._width = width
        self._column = 0
        self._spaces = self._word = ""

    def write(self, text: str) -> None:
        """Write a piece of the text."""
        for piece in _PIECES.findall(text):
            if not piece.isspace():
                self._word += piece
                continue
            self._put_word()
            if piece == "\n":
                self._stream.write("\n")
                self._column, self._spaces = 0, ""
            else:
                self._spaces += piece
        self._stream.flush()

    def end(self) -> None:
        """Write the last word, and end the line."""
        self._put_word()
        self._stream.write("\n")
        self._stream.flush()
        self._column, self._spaces = 0, ""

    def _put_word(self) -> None:
        if not self._word:
            return
        width = self._width or shutil.get_terminal_size().columns
        if self._column and self._column + len(self._spaces) + len(self._word) > width:
            # The spaces at which the line is broken would indent the next one.
            self._stream.write("\n")
            self._column, self._spaces = 0, ""
        self._stream.write(self._spaces + self._word)
        self._column += len(self._spaces) + len(self._word)
        self._spaces = self._word = ""
