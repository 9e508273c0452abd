"""A rendered conversation: the prompt, with marks at the characters that clients wrote."""

from __future__ import annotations

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

    def __len__(self) -> int:
        return len(self.text)
