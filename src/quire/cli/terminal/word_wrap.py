"""Word wrap for text that is written to a terminal while it is generated."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from typing import TextIO


def in_lines(text: str) -> str:
    """Return a text with lines that are broken between words to fit the terminal."""
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())


class WordWrap:
    """Writes text in pieces of any length; a word that does not fit into its line begins the next one.

    A word is held back until a space, a line break or the end follows, or until it is as long as a line. Each character
    of two columns, such as in Chinese, is a word, since such texts have no spaces.
    """

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._stream = stream
        self._width = width
        self._column = 0
        self._spaces = self._word = ""

    def write(self, text: str) -> None:
        """Write a piece of the text."""
        for char in text:
            if char.isspace() or _columns(char) == 2:
                self._put_word()
            if char == "\n":
                self._end_line()
            elif char.isspace():
                self._spaces += char
            else:
                self._word += char
                if _columns(char) == 2 or len(self._word) >= self._columns_of_line():
                    self._put_word()
        self._stream.flush()

    def end(self) -> None:
        """Write the last word, and end the line."""
        self._put_word()
        self._end_line()
        self._stream.flush()

    def _put_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + _columns(self._spaces + self._word) > self._columns_of_line():
            # Spaces at the break are dropped, since they would indent the next line.
            self._end_line()
        self._stream.write(self._spaces + self._word)
        self._column += _columns(self._spaces + self._word)
        self._spaces = self._word = ""

    def _end_line(self) -> None:
        self._stream.write("\n")
        self._column, self._spaces = 0, ""

    def _columns_of_line(self) -> int:
        return self._width or shutil.get_terminal_size().columns


def _columns(text: str) -> int:
    """Return the number of columns of a text on a terminal."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char) for char in text)
