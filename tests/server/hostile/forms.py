"""Schemas, expressions, grammars, tools and conversations: legal ones, hostile ones, and all between."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.server.hostile import values

REGEXES = (
    *("a+", "(a+)+$", "(a|aa)*b", "a{1000}", "(a{100}){100}", "[", "(", "\\", "(?<=a)b", "\\1(a)", ".{0,100000}", "^$"),
    *("(?i)a", "[^\\x00-\\x7f]+", "\\p{L}+", "a{2,1}", "a**", "(?P<n>a)(?P=n)", "((((((((((a))))))))))", "[\\d-z]"),
    *("\\ud800", "(x+x+)+y", "[a-z]{3}|[A-Z]{3}", "", "$a^", "(?#x)", "\\u{110000}", "[[:alpha:]]", "a|b|", "\0"),
)
GRAMMARS = (
    'start: "a"',
    'start: "a" start | "b"',
    'start: e\ne: e e | "a" | "b" | "c"',
    "start: start",
    "start: x",
    "start: /(a+)+/",
    "start: /[/",
    "",
    "start:",
    'start: "a"~1000000',
    'start: "a"~5..1',
    "%import common.WORD\nstart: WORD",
    '%ignore /.*/\nstart: "a"',
    'start: ("a" | "b")* "c"',
    'start: a\na: b\nb: c\nc: a | "x"',
    '?start: "\\ud800"',
    "start: <[5-7]>",
    "start: <|eos|>",
    "start: @json",
    "%llguidance {}\nstart: /x/",
    'start: ""',
)
KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs"),
    *("pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "minItems", "maxItems"),
    *("prefixItems", "additionalProperties", "patternProperties", "if", "then", "else", "uniqueItems", "default"),
)
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "any", "", None, ["string", "null"], 5)


def schema(rng: Random, depth: int = 3) -> Any:
    """Return a JSON schema, or what is almost one."""
    made: dict[str, Any] = {}
    for keyword in rng.sample(KEYWORDS, rng.randint(0, 4)):
        inner = schema(rng, depth - 1) if depth else True
        made[keyword] = {
            "type": rng.choice(TYPES),
            "properties": {values.name(rng): inner, "a": inner},
            "required": rng.choice([["a"], ["missing"], "a", [1], []]),
            "items": inner,
            "prefixItems": [inner],
            "enum": rng.choice([["a"], [], [1, None], list(range(500)), ["x" * 1000]]),
            "anyOf": [inner, {"type": "string"}],
            "oneOf": [inner],
            "allOf": [inner, inner],
            "not": inner,
            "$ref": rng.choice(["#", "#/$defs/a", "#/nothing", "http://localhost/x", "file:///etc/passwd", ""]),
            "$defs": {"a": inner},
            "pattern": rng.choice(REGEXES),
            "format": rng.choice(["date-time", "uuid", "email", "nothing", ""]),
            "additionalProperties": inner,
            "patternProperties": {rng.choice(REGEXES): inner},
        }.get(keyword, values.scalar(rng))
    if rng.random() < 0.5:
        made["type"] = rng.choice(["object", "string", "integer", "array"])
    return made


def structured(rng: Random) -> dict[str, Any]:
    """Return fields that ask for an output of a form."""
    kind = rng.choice(["json", "regex", "choice", "grammar", "json_object"])
    wanted = {
        "json": schema(rng),
        "regex": rng.choice(REGEXES),
        "choice": rng.choice([["a", "b"], [""], [], ["x" * 5000], [values.text(rng) for _ in range(50)], "a"]),
        "grammar": rng.choice(GRAMMARS),
        "json_object": rng.choice([True, False, 1]),
    }[kind]
    if rng.random() < 0.1:
        wanted = values.value(rng)
    if kind == "json" and rng.random() < 0.5:
        described = {"name": values.name(rng), "schema": wanted, "strict": rng.choice([True, False, None, 1])}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    if kind != "json_object" and rng.random() < 0.5:
        return {f"guided_{kind}": wanted}
    more = {"disable_any_whitespace": values.scalar(rng)} if rng.random() < 0.2 else {}
    return {"structured_outputs": {kind: wanted, **more}}


def tools(rng: Random) -> dict[str, Any]:
    """Return fields that offer tools."""
    listed = []
    for _ in range(rng.choice([0, 1, 2, 3, 130])):
        function: Any = {"name": rng.choice(["get_weather", "now", values.name(rng)])}
        if rng.random() < 0.7:
            function["parameters"] = rng.choice([schema(rng), {"type": "object", "properties": {"city": schema(rng)}}])
        if rng.random() < 0.3:
            function["strict"] = rng.choice([True, values.scalar(rng)])
        if rng.random() < 0.3:
            function["description"] = values.text(rng)
        listed.append({"type": rng.choice(["function"] * 8 + ["x", None]), "function": function})
    named = {"type": "function", "function": {"name": rng.choice(["get_weather", "nothing", "", 5])}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": rng.choice(["auto", "x"]), "tools": [named]}}
    fields: dict[str, Any] = {"tools": listed}
    if rng.random() < 0.7:
        choices = ["auto", "none", "required", named, allowed, values.value(rng)]
        fields["tool_choice"] = rng.choice(choices)
    if rng.random() < 0.3:
        fields["parallel_tool_calls"] = values.scalar(rng)
    return fields


def image(rng: Random) -> dict[str, Any]:
    """Return a part of a message that is not quite an image, in the form of one of the protocols."""
    urls = ["http://localhost:1/x", "file:///etc/passwd", "data:,x", "", "gopher://x", "data:" + ";" * 5000]
    urls += ["data:image/png;base64,iVBORw0KGgo=", "data:image/gif;base64,R0lGODlh", "data:image/png;base64,%ff="]
    url: Any = rng.choice([*urls, values.text(rng), values.value(rng)])
    detail = rng.choice(["low", "high", values.scalar(rng)])
    source = {"type": rng.choice(["base64", "url", "file", values.scalar(rng)]), "media_type": "image/png"}
    return rng.choice(
        [
            {"type": "image_url", "image_url": rng.choice([{"url": url}, {"url": url, "detail": detail}, url])},
            {"type": "input_image", "image_url": url, "detail": detail},
            {"type": "image", "source": rng.choice([{**source, "data": url, "url": url}, url])},
            {"type": "image", "image": url},
            {"type": rng.choice(["x", "video_url", "file"]), "image_url": {"url": url}},
        ]
    )


def messages(rng: Random) -> list[Any]:
    """Return a conversation."""
    made: list[Any] = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 20])):
        role = rng.choice(["user", "assistant", "system", "tool", "developer", "king", "", None, 1])
        contents = [values.text(rng), None, "", [{"type": "text", "text": values.text(rng)}], values.value(rng)]
        message: Any = {"role": role, "content": rng.choice(contents)}
        if rng.random() < 0.2:
            message["content"] = [image(rng) for _ in range(rng.choice([1, 1, 2, 40]))]
        if rng.random() < 0.2:
            arguments = rng.choice(['{"city": "x"}', "{", "null", "[" * 500, values.text(rng), {"city": 1}])
            call = {"id": values.scalar(rng), "type": "function", "function": {"name": "now", "arguments": arguments}}
            message["tool_calls"] = rng.choice([[call], [], [call] * 50, values.value(rng)])
        if rng.random() < 0.1:
            message["tool_call_id"] = values.scalar(rng)
        if rng.random() < 0.1:
            message["sanitize_control_tokens"] = rng.choice([True, False, None, values.value(rng)])
        made.append(message if rng.random() < 0.95 else values.value(rng))
    return made
