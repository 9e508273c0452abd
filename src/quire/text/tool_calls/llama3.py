"""Llama 3's format: JSON objects with name and parameters, `;` between them, optionally after `<|python_tag|>`."""

from __future__ import annotations

from quire.text.tool_calls import grammar
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.object_calls import read_series
from quire.text.tool_calls.parser import CallReader

MARK = "<|python_tag|>"
# The text by which Llama 3's templates show the format to the model.
SHOWN = '"parameters": dictionary'
SPACE = r"[ \t\n\r]*"


class Llama3:
    """Calls are the whole output, or the rest of it after the mark.

    Source: Llama 3.1, 3.2 and 3.3.
    """

    name = "llama3"
    marker = MARK
    other_markers = ()
    may_be_bare = True
    id_chars = None
    answer_head = ""

    @classmethod
    def for_template(cls, source: str) -> Llama3:
        """Return the format; templates do not change it."""
        del source
        return cls()

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return MARK in source or SHOWN in source

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read calls up to the end of the output."""
        return (yield from read_series(incoming, pos, reader, ";", ""))

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: text that does not begin like a call, or calls only.

        Free text contains no other added tokens, because these end a turn or are reserved in Llama's vocabulary.
        """
        if rules.is_required:
            more = ' ("; " object)*' if rules.is_parallel else ""
            return grammar.whole([f"start: object{more}", *grammar.object_calls(rules, "parameters")])
        lines = []
        options = []
        for idx, function in enumerate(rules.functions):
            lines.append(f'HEAD_{idx}: /{_begun(function.name)}{SPACE},{SPACE}"parameters"{SPACE}:{SPACE}/')
            options.append(f'HEAD_{idx} args_{idx} "}}"')
        names = "|".join(function.name for function in rules.functions)
        # Free text never begins like a call, so that every text that the parser reads as a call is constrained as one.
        text = f"/(?s:.*)/ & ~/{_begun(f'({names})')}(?s:.*)/"
        text_rules = CallRules(functions=rules.functions, tokens=rules.tokens)
        lines += [f"call: {' | '.join(options)}", *grammar.arguments(rules)]
        lines += grammar.free_text(text_rules, MARK, text)
        more = ' (";" call)*' if rules.is_parallel else ""
        return grammar.whole([f"start: free | opened? call{more}", *lines])


def _begun(name: str) -> str:
    """Return the regular expression of a call's beginning, up to its function's name."""
    kind = f'("type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    return f'{SPACE}\\{{{SPACE}{kind}"name"{SPACE}:{SPACE}"{name}"'
