"""gpt-oss' format (harmony): messages in channels, each with a header."""

from __future__ import annotations

import re

from quire.sequences.thinking import ThinkingPhase
from quire.text.reasoning.parser import ReasoningSplit, begun_length

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
# Header of a function call, up to the name. Headers of calls are normalised to it, since models also put the recipient
# before the channel.
TO_FUNCTION = f"{CHANNEL}commentary to=functions."
# Texts with which a header can begin: another message, the channel of the prompt's message, or its recipient.
HEADS = (START, CHANNEL, " to=")
ENDS = (END, CALL, RETURN, START)
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r" to=([^\s<]*)")
# Headers are short; a longer text without the end of a header is content.
MAX_HEADER_CHARS = 1024


class Harmony:
    """Channels: `analysis` is reasoning; `final` and `commentary` are content.

    A message with a recipient (`to=functions.NAME`) is a call: it stays in the content, with a header in one spelling,
    for the parser of calls.

    Source: OpenAI's harmony response format.
    """

    name = "harmony"
    # A header's end; the channel of thinking is the first one that is not `final`.
    start = MESSAGE
    end = f"{CHANNEL}final{MESSAGE}"
    close = f"{END}{START}assistant{end}"
    boundaries = (START,)
    special_tokens = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    has_headers = True

    def parser(self, phase: ThinkingPhase) -> HarmonyParser:
        """Return the parser of an output that begins in a phase."""
        return HarmonyParser(phase)


class HarmonyParser:
    """Parser of one output with channels; two messages of one kind have an empty line between them."""

    def __init__(self, phase: ThinkingPhase) -> None:
        self._held = ""
        self._is_header = phase is ThinkingPhase.BEFORE
        self._is_content = phase is ThinkingPhase.AFTER
        self._is_call = False
        # For reasoning and content: True if there is text, so that the next message needs a separator.
        self._has_text = [False, False]
        self._separators = ["", ""]

    def push(self, text: str) -> ReasoningSplit:
        """Add text, and return the text that is assigned now."""
        self._held += text
        return self._take(is_ended=False)

    def finish(self) -> ReasoningSplit:
        """Return the remaining text at the end of the output; an incomplete header is left out."""
        return self._take(is_ended=True)

    def _take(self, *, is_ended: bool) -> ReasoningSplit:
        taken = ["", ""]
        while self._held:
            before = self._held
            if self._is_header:
                self._read_header(taken, is_ended=is_ended)
            else:
                self._read_body(taken, is_ended=is_ended)
            if self._held == before:
                break
        return ReasoningSplit(*taken)

    def _read_header(self, taken: list[str], *, is_ended: bool) -> None:
        text = self._held
        end = text.find(MESSAGE)
        if end < 0 and len(text) <= MAX_HEADER_CHARS + len(MESSAGE) and _may_begin_header(text):
            self._held = "" if is_ended else text
            return
        self._is_header = False
        if not 0 <= end <= MAX_HEADER_CHARS or not text.startswith(HEADS):
            self._is_content, self._is_call = True, False
            self._begin_message()
            self._read_body(taken, is_ended=is_ended)
            return
        header, self._held = text[:end], text[end + len(MESSAGE) :]
        channel = CHANNEL_NAME.search(header)
        recipient = RECIPIENT.search(header)
        self._is_call = recipient is not None
        self._is_content = self._is_call or channel is None or channel[1] != "analysis"
        self._begin_message()
        if recipient is not None:
            self._add(taken, f"{CHANNEL}commentary to={recipient[1]}{MESSAGE}")

    def _begin_message(self) -> None:
        kind = int(self._is_content)
        self._separators[kind] = "\n\n" if self._has_text[kind] and not self._is_call else ""

    def _read_body(self, taken: list[str], *, is_ended: bool) -> None:
        text = self._held
        ends = [(at, end) for end in ENDS if (at := text.find(end)) >= 0]
        if not ends:
            sure = len(text) if is_ended else len(text) - begun_length(text, *ENDS)
            self._add(taken, text[:sure])
            self._held = text[sure:]
            return
        at, marker = min(ends)
        is_next = marker == START
        self._add(taken, text[:at] + (marker if self._is_call and not is_next else ""))
        self._held = text[at if is_next else at + len(marker) :]
        self._is_header = True

    def _add(self, taken: list[str], text: str) -> None:
        if text:
            kind = int(self._is_content)
            taken[kind] += self._separators[kind] + text
            self._separators[kind] = ""
            self._has_text[kind] = True


def _may_begin_header(text: str) -> bool:
    return any(text.startswith(head) or head.startswith(text) for head in HEADS)
