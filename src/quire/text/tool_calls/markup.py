"""Formats of tool calls as values: the fixed texts around calls, names and arguments, and the form of the arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.text.tool_calls.value_grammar import ValueSyntax

# Words for values: of JSON, and also Python's, which many templates write.
JSON_WORDS: Mapping[str, tuple[str, ...]] = {word: (word,) for word in ("true", "false", "null")}
BOTH_WORDS: Mapping[str, tuple[str, ...]] = {
    "true": ("true", "True"),
    "false": ("false", "False"),
    "null": ("null", "None"),
}


JSON_VALUES = ValueSyntax(words=JSON_WORDS, comma=", ", colon=": ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallObject:
    """Calls that are JSON objects with a name and arguments.

    Args:
        name_key: key of the name.
        arguments_key: key of the arguments; `ARGUMENT_KEYS` are all read.
        first_key: key of an id before the name; "" if there is none.
        last_key: key of an id after the arguments, which may be left out; "" if there is none.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    first_key: str = ""
    last_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonArguments:
    """Arguments that are a JSON object after the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Arguments between tags, with strings as plain text. The schema decides which texts are strings.

    Args:
        key_begin: text before a key.
        key_end: text between a key and its value. Only if it ends with a line break, one before the value is left out.
        value_end: text after a value; likewise with a line break at its beginning.
        json_key_end: text in place of `key_end` before a value that is JSON; "" if the schema alone tells strings from
            other values.
        values: spelling of lists and objects; words may be Python's anyway.
    """

    key_begin: str
    key_end: str
    value_end: str
    json_key_end: str = ""
    values: ValueSyntax = JSON_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordArguments:
    """Arguments as in a function call: keys and values with separators between them.

    Args:
        keys: spelling of the arguments' keys, and the separators.
        values: spelling of the values, and of objects inside them.
    """

    keys: ValueSyntax
    values: ValueSyntax


Arguments = CallObject | JsonArguments | TaggedArguments | KeywordArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """One spelling of calls: blocks of one or several calls, in text or one after the other.

        block = begin open call (between call)* close end
        call  = (server_begin SERVER)? call_begin NAME (id_begin ID)? name_end ARGUMENTS call_end

    A grammar has these texts exactly. A reader ignores white space at their ends, and around line breaks inside them.

    Args:
        arguments: form of the arguments; with `CallObject`, a call has no other parts.
        begin: mark before a block.
        open: text between it and the first call.
        between: text between two calls of a block; None if a block has one call.
        close: text after the last call.
        end: mark after it; "" if there is none.
        next_block: text between two blocks of outputs without other text, if a block has one call; it may be left out.
        server_begin: text before the name of a server that has the function; "" if calls name none.
        call_begin: text before the name.
        id_begin: text before an id of the call after the name, which may be left out; "" if there are no ids.
        id_pattern: regular expression of ids of calls.
        name_end: text between the name and the arguments.
        call_end: text after the arguments.
        inner_marks: further texts for which a tokenizer may have single tokens.
        may_be_bare: True if an output may begin with calls without `begin`; they are its whole text.
        content_begin: text before the content of an output that does not begin with calls, which is left out; "" if
            there is none.
        id_chars: length of call ids (letters and digits) that templates require; None for any length.
        counted_id: call ids that models and templates write, with `{name}` and `{number}` of the call, which counts the
            calls of a conversation from 0; "" if ids are random.
    """

    arguments: Arguments
    begin: str
    open: str = ""
    between: str | None = None
    close: str = ""
    end: str = ""
    next_block: str = ""
    server_begin: str = ""
    call_begin: str = ""
    id_begin: str = ""
    id_pattern: str = ""
    name_end: str = ""
    call_end: str = ""
    inner_marks: tuple[str, ...] = ()
    may_be_bare: bool = False
    content_begin: str = ""
    id_chars: int | None = None
    counted_id: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts for which a tokenizer may have single tokens; the first one is `begin`."""
        return tuple(filter(None, (self.begin, self.end, *self.inner_marks)))


def parts_of(text: str) -> list[str]:
    """Return the parts of a fixed text between line breaks, without the white space around these."""
    return [part for part in re.split(r"\s*\n\s*", text.strip()) if part]
