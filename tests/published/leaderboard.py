"""The calls of the Berkeley function-calling leaderboard: functions, and every possible answer to each question."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from quire.text.tool_calls import Function
from tests.published.folders import CALLS, named

# JSON's types of those that the set has, some in the spelling of Java; values of others may be anything.
TYPES = {
    **{kind: kind for kind in ("array", "boolean", "integer", "number", "object", "string")},
    "arraylist": "array",
    "tuple": "array",
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "char": "string",
}
# Functions of a question that its answer does not call; few, since they only lengthen prompts.
MAX_OTHERS = 3


class Answer(NamedTuple):
    """A possible answer.

    Args:
        calls: name and arguments of each call, which are in the order of the schema.
        functions: functions that may be called.
        fits: True if the arguments fit the schema, and are the only ones that their text between tags can mean.
    """

    calls: list[tuple[str, dict[str, Any]]]
    functions: list[Function]
    fits: bool


@cache
def answers() -> tuple[Answer, ...]:
    """Return all answers, such that each alternative value of an argument is in one of them."""
    folder = named(CALLS)
    files = [] if folder is None else sorted(folder.glob("possible_answer/*.json"))
    found: list[Answer] = []
    for path in files:
        questions = {one["id"]: one for one in _lines(path.parent.parent / path.name)}
        for one in _lines(path):
            if "multi_turn" in path.name:
                found += _written_as_python(one, path.parent.parent)
            elif isinstance(one["ground_truth"][0], dict):
                found += _alternatives(one, questions[one["id"]]["function"])
    return tuple(found)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text("utf-8").splitlines() if line)


def _alternatives(one: Mapping[str, Any], definitions: list[dict[str, Any]]) -> Iterator[Answer]:
    """Yield answers that together have all alternatives of each argument."""
    truth = [next(iter(call.items())) for call in one["ground_truth"]]
    called = {name for name, _ in truth}
    others = [each for each in definitions if each["name"] not in called][:MAX_OTHERS]
    functions = [_function(each) for each in definitions if each["name"] in called or each in others]
    keys = {function.name: [*function.parameters["properties"]] for function in functions}
    for number in range(max(len(options) for _, arguments in truth for options in [*arguments.values(), [0]])):
        calls = []
        for name, arguments in truth:
            chosen = {key: _chosen(options, number) for key, options in arguments.items() if options}
            # An empty alternative means that the argument is left out.
            given = {key: value for key, value in chosen.items() if value != "" and key in keys[_name(name)]}
            calls.append((_name(name), given))
        yield _answer(calls, functions)


def _chosen(options: Any, number: int) -> Any:
    """Return one of a list of alternatives; the values of objects may be such lists, too."""
    if not isinstance(options, list):
        return options
    if not options:
        return options
    value = options[min(number, len(options) - 1)]
    if isinstance(value, dict):
        return {key: _chosen(each, number) for key, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [{key: _chosen(part, number) for key, part in each.items()} for each in value]
    return value


def _written_as_python(one: Mapping[str, Any], folder: Path) -> Iterator[Answer]:
    """Yield the answers to a conversation's questions, which are calls in Python's syntax."""
    known = _documented(folder)
    for lines in one["ground_truth"]:
        calls = []
        for line in lines:
            call = ast.parse(line, mode="eval").body
            assert isinstance(call, ast.Call)
            assert isinstance(call.func, ast.Name)
            keys = [*known[call.func.id].parameters["properties"]]
            given = dict(zip(keys, call.args, strict=False)) | {
                each.arg: each.value for each in call.keywords if each.arg
            }
            values = {key: ast.literal_eval(value) for key, value in given.items()}
            calls.append((call.func.id, values))
        if calls:
            yield _answer(calls, [known[name] for name in dict.fromkeys(name for name, _ in calls)])


def _answer(calls: list[tuple[str, dict[str, Any]]], functions: list[Function]) -> Answer:
    schemas = {one.name: one.parameters for one in functions}
    ordered = [(name, _ordered(arguments, schemas[name])) for name, arguments in calls]
    fits = all(
        Draft202012Validator(schemas[name]).is_valid(arguments) and not _is_ambiguous(arguments, schemas[name])
        for name, arguments in ordered
    )
    return Answer(ordered, functions, fits)


def _is_ambiguous(arguments: Mapping[str, Any], schema: Any) -> bool:
    """Return whether a string without a type, such as "42", is the text of another value too."""
    untyped = [key for key, one in schema["properties"].items() if "type" not in one]
    return any(isinstance(arguments.get(key), str) and _is_json(arguments[key]) for key in untyped)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _ordered(value: Any, schema: Any) -> Any:
    """Return a value whose keys are in the order of its schema, as grammars have them."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_ordered(each, schema.get("items")) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    keys = [*(key for key in properties if key in value), *(key for key in value if key not in properties)]
    return {key: _ordered(value[key], properties.get(key)) for key in keys}


@cache
def _documented(folder: Path) -> dict[str, Function]:
    files = sorted(folder.glob("multi_turn_func_doc/*.json"))
    return {one.name: one for path in files for one in map(_function, _lines(path))}


def _name(name: str) -> str:
    """Return a name in the characters that names have."""
    return name.replace(".", "_")


def _function(definition: Mapping[str, Any]) -> Function:
    return Function(_name(definition["name"]), _schema(definition["parameters"]))


def _schema(value: Any) -> Any:
    """Return a schema with the types of JSON."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _schema(each) for key, each in value.items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        del schema["type"]
        if kind.lower() in TYPES:
            schema["type"] = TYPES[kind.lower()]
    return schema
