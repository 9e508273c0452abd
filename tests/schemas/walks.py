"""Random outputs of grammars, byte by byte, and checks of them with the package `jsonschema`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from random import Random
from typing import Any

import pytest

from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import compile_grammar
from quire.text.tool_calls import CallDelta, CallParser, CallRules, Function, ToolFormat, merge

llguidance = pytest.importorskip("llguidance", reason="grammars are compiled by llguidance")
jsonschema = pytest.importorskip("jsonschema", reason="outputs are checked with the package jsonschema")
# Bytes that close something, which a random walk would come to late.
CLOSING = frozenset(b'"}]>\n|')


@cache
def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes."""
    return llguidance.LLTokenizer("byte")


def walk(matcher: Any, rng: Random, max_bytes: int = 1500) -> str | None:
    """Return an output drawn from the masks; None where it is not complete."""
    matcher, output = matcher.deep_copy(), bytearray()
    while len(output) < max_bytes:
        if matcher.is_stopped():
            return output.decode() if matcher.is_accepting() else None
        allowed, closing, may_end = _choices(matcher.compute_bitmask())
        if matcher.is_error():
            _at_limit(matcher, output)
            return None
        if may_end and (not allowed or rng.random() < 0.4):
            return output.decode()
        assert allowed, f"a dead end after {bytes(output)!r}: {matcher.get_error()}"
        token = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        output.append(token)
        if not matcher.consume_token(token):
            _at_limit(matcher, output)
            return None
    return None


def _at_limit(matcher: Any, output: bytearray) -> None:
    """Check that an output ends at a limit of the lexer, not at a dead end of its grammar."""
    error = matcher.get_error()
    assert "too many" in error or "fuel" in error or matcher.stop_reason() == "LexerTooComplex", (output, error)


@lru_cache(4096)
def _choices(mask: bytes) -> tuple[list[int], list[int], bool]:
    """Return the bytes that a mask allows, those of them that close something, and whether the output may end."""
    bits = int.from_bytes(mask, "little")
    allowed = [token for token in range(256) if bits >> token & 1]
    may_end = bool(bits >> byte_tokenizer().eos_token & 1)
    return allowed, [token for token in allowed if token in CLOSING], may_end


def writes(matcher: Any, text: str) -> bool:
    """Return whether a grammar allows a whole text."""
    matcher, tokens = matcher.deep_copy(), list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def compiled(source: GrammarSource) -> Any:
    """Return the matcher of a grammar.

    Raises:
        ValueError: it does not compile.
    """
    return compile_grammar(byte_tokenizer(), source, is_trial=True)


# ---- validity ----


def is_valid(text: str, schema: Any) -> bool:
    """Return whether JSON is valid after a schema, whichever of equal keys a reader takes."""
    validator = _validator(json.dumps(schema))
    return all(
        validator.is_valid(json.loads(text, parse_float=_number, object_pairs_hook=hook)) for hook in (dict, _firsts)
    )


def _firsts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _number(text: str) -> float | Decimal:
    """Return a number that is exactly the written one."""
    value = float(text)
    try:
        return value if math.isfinite(value) and Decimal(repr(value)) == Decimal(text) else Decimal(text)
    except InvalidOperation:  # an exponent of very many digits
        return value


@cache
def _validator(text: str) -> Any:
    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = jsonschema.validators.extend(kind, {"multipleOf": _is_multiple})
    return exact(schema, format_checker=kind.FORMAT_CHECKER)


def _is_multiple(_validator: Any, multiple: float, value: Any, _schema: Any) -> Any:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        rest = Decimal(str(value)) / Decimal(str(multiple))
        if rest != rest.to_integral_value():
            yield jsonschema.ValidationError(f"{value} is no multiple of {multiple}")


# ---- calls ----


def call_matcher(form: ToolFormat, schema: Mapping[str, Any], *, is_strict: bool) -> tuple[Any, Function]:
    """Return the matcher of one call of a function with a schema, and the function.

    Raises:
        InvalidParameter: the schema is refused.
    """
    function = function_of(schema, is_strict=is_strict)
    return compiled(GrammarSource("grammar", form.grammar(rules_of(function)))), function


def function_of(schema: Mapping[str, Any], *, is_strict: bool) -> Function:
    """Return a function whose arguments have a schema."""
    return Function("f", schema, is_strict=is_strict, field="tools[0].function.parameters")


def rules_of(function: Function) -> CallRules:
    """Return the rules of exactly one call of a function."""
    return CallRules(functions=[function], is_required=True, is_parallel=False)


def read_call(form: ToolFormat, text: str, function: Function) -> str:
    """Return the arguments of the call in an output."""
    parser = CallParser(form, [function], is_forced=True)
    pieces = merge([*parser.push(text), *parser.finish()])
    (call,) = [piece for piece in pieces if isinstance(piece, CallDelta)]
    assert call.is_last, text
    return call.arguments


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call of `f` as a model of a format without JSON writes it."""
    if name == "qwen3_xml":
        members = (f"<parameter={key}>\n{_xml(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=f>\n{''.join(members)}</function>\n</tool_call>"
    if name == "lfm2":
        bare = re.compile(r"[a-zA-Z0-9_.\u00a1-\U0010ffff-]{1,64}")
        members = (
            f"{key if bare.fullmatch(key) else _python(key)}={_python(value)}" for key, value in arguments.items()
        )
        return f"<|tool_call_start|>[f({', '.join(members)})]<|tool_call_end|>"
    return f"<|tool_call>call:f{_marked(arguments)}<tool_call|>"


def _xml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _marked(value: Any) -> str:
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda each: each[0].lower())
        return f"{{{','.join(f'{_marked_key(key)}:{_marked(one)}' for key, one in pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_marked, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _marked_key(key: str) -> str:
    return key if re.fullmatch(r"[$/@#+%&*!?=~|();a-zA-Z0-9_.\u00a1-\U0010ffff-]{1,64}", key) else f'<|"|>{key}<|"|>'
