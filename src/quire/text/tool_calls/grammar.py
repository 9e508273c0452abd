"""Parts of the grammars that constrain an output to a format, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import OR_ELSE, StructuredOutputs, lark_literal
from quire.text.schemas.as_json import PlainSchema, as_json, enforceable
from quire.text.schemas.document import SchemaError
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls.argument_schema import argument_schema
from quire.text.tool_calls.calls import Function

# The layout of `json.dumps`, which models see in their prompts. Free white space would let a weak model write white
# space forever.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A slash or a line's end, which must be escaped in an expression of a rule; other escaped characters match, and stay.
UNQUOTED = re.compile(r"\\?[/\n\r]|\\.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The allowed calls of an output.

    Args:
        functions: functions that may be called, at least one.
        is_required: True if the output consists of calls only; False if text may precede or replace them.
        is_parallel: True if more than one call is allowed.
        tokens: token ids of the markers that are single tokens.
        text_tokens: ids of other tokens that free text may contain although a grammar does not count them as text; see
            `text_tokens`.
    """

    functions: Sequence[Function]
    is_required: bool = False
    is_parallel: bool = True
    tokens: Mapping[str, int] = field(default_factory=dict)
    text_tokens: Sequence[int] = ()


def whole(lines: Iterable[str]) -> str:
    """Return the grammar of these rules."""
    return "\n".join(["%llguidance {}", *lines, ""])


def calls_or_answer(calls: str, answer: StructuredOutputs, head: str = "") -> str:
    """Return the grammar of outputs that are either calls or a structured answer."""
    kind, text, _, is_closed = answer.source
    if kind == "json":
        try:
            rule = f"answer: {json_rule(enforceable(json.loads(text), is_closed=is_closed))}"
        except SchemaError as error:
            raise InvalidParameter(answer.field, text, f"a JSON schema that compiles: {error}") from error
    elif kind == "choice":
        rule = f"answer: {' | '.join(map(literal, json.loads(text)))}"
    elif kind == "regex":
        rule = f"answer: /{UNQUOTED.sub(_in_rule, text)}/"
    else:
        raise UnsupportedFeature(answer.field, 'a grammar has no tools beside it; set tool_choice to "none"')
    return calls.replace("\nstart: ", f"\nstart: only_calls | {head}answer\nonly_calls: ", 1) + f"{rule}\n"


literal = lark_literal


def json_rule(schema: PlainSchema) -> str:
    """Return the rule expression of JSON that meets a schema."""
    return f"%json {json.dumps({**schema.schema, 'x-guidance': LAYOUT | schema.layout}, ensure_ascii=False)}"


def _in_rule(match: re.Match[str]) -> str:
    """Return a part of a regular expression, escaped for a rule."""
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(match[0][-1], match[0])


def written(text: str, tokens: Mapping[str, int]) -> str:
    """Return the expression of a fixed text: tokens for the marks in it that are tokens, and literal text between."""
    marks = sorted((mark for mark in tokens if mark in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return joined(*(f"<[{tokens[part]}]>" if part in tokens else literal(part) for part in parts if part))


def joined(*parts: str) -> str:
    """Return the expression of parts that follow one another, without empty ones."""
    return " ".join(part for part in parts if part)


def arguments(rules: CallRules) -> list[str]:
    """Return the rules `args_0`, `args_1`, ...: the arguments of each function."""
    lines = [f"any_args: {json_rule(PlainSchema({'type': 'object'}, {}))}"]
    for idx, function in enumerate(rules.functions):
        line = f"args_{idx}: {json_rule(as_json(argument_schema(function)))}"
        lines.append(line if function.is_strict else f"{line}{OR_ELSE}args_{idx}: any_args")
    return lines


def free_text(rules: CallRules, mark: str, text: str = r"/(?s:.*)/") -> list[str]:
    """Return the rules `free`, text without the marker, and `opened`, text that ends with the marker.

    The marker, as literal text or as its token, always ends the text. The parser sees text without some of the tokens
    in it, so none of these tokens may follow a part of the marker.
    """
    lines = [f"TEXT: {text}", f"written[lazy]: TEXT {literal(mark)}"]
    endings = ["written"]
    if mark in rules.tokens:
        endings.append(f"TEXT {written(mark, rules.tokens)}")
    elif any(one in mark for one in rules.tokens):
        # The beginning of the mark is text, so it belongs to the terminal.
        token = max((one for one in rules.tokens if one in mark), key=len)
        begin, _, end = mark.partition(token)
        lines.append(f"BEGUN: {text} & /(?s:.*){re.escape(begin)}/")
        endings.append(joined("BEGUN", f"<[{rules.tokens[token]}]>", written(end, rules.tokens)))
    parts = ""
    if others := sorted(set(rules.text_tokens) - set(rules.tokens.values())):
        begun = "|".join(re.escape(mark[:length]) for length in range(1, len(mark)))
        lines.append(f"BEFORE: {text} & ~/(?s:.*)({begun})/")
        lines.append(f"part: BEFORE <[{','.join(_ranges(others))}]>")
        parts = "part* "
    return [*lines, f"free: {parts}TEXT", f"opened: {parts}({' | '.join(endings)})"]


def text_tokens(tokenizer: Tokenizer, marker: str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that free text may contain although a grammar does not count them as text, like `<think>`.

    llguidance treats added tokens as text unless they are special, or in angle brackets. Tokens whose visible text
    could be a part of a marker are left out.
    """
    # With thousands of added tokens, this is done for each request: tuples are compared in compiled code.
    cuts = range(1, len(marker))
    heads, tails = tuple(marker[:cut] for cut in cuts), tuple(marker[cut:] for cut in cuts)
    special_ids = tokenizer.special_ids
    ids = {
        token_id
        for text, token_id in tokenizer.added_ids.items()
        if token_id in special_ids or (text.startswith("<") and text.endswith(">"))
        # A text and its neighbours may together form the marker.
        if not (text.endswith(heads) or text.startswith(tails) or marker in text or text in marker)
        if token_id < vocab_size
    }
    return tuple(sorted(ids - {tokenizer.eos_token_id}))


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending ids as ranges."""
    begins = [ids[0], *(after for before, after in pairwise(ids) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ids) if after != before + 1), ids[-1]]
    for begin, end in zip(begins, ends, strict=True):
        yield str(begin) if begin == end else f"{begin}-{end}"
