"""A rendered conversation: the prompt, with marks at the characters that clients wrote."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from quire.text.chat.images import ChatImage
from quire.text.vocabulary.control_tokens import ControlTokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation rendered by a chat template.

    Args:
        text: the prompt.
        marked: the prompt with marks in the texts of clients (see `text.vocabulary.marks`); None if it has no mark.
        control: control tokens that these texts may not become; None allows all.
        images: images of the conversation, for each of which the template has written a placeholder.
    """

    text: str
    marked: str | None = None
    control: ControlTokens | None = None
    images: tuple[ChatImage, ...] = ()

    def replace(self, template_text: str, other: str) -> ChatPrompt:
        """Return the prompt with another text in place of one, wherever the template has written it."""
        places = self.text if self.marked is None else self.marked
        starts = [match.start() for match in re.finditer(re.escape(template_text), places)]
        ends = [0, *(start + len(template_text) for start in starts)]

        def rewritten(text: str) -> str:
            return other.join(text[start:end] for start, end in zip(ends, [*starts, len(text)], strict=True))

        marked = None if self.marked is None else rewritten(self.marked)
        return dataclasses.replace(self, text=rewritten(self.text), marked=marked)

    def __len__(self) -> int:
        return len(self.text)
