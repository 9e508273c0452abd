"""The request fields of structured outputs: OpenAI's, vLLM's and vLLM's earlier ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.server.requests.fields import Fields, Refusal

STRUCTURED_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "format",
    "json_schema",
    "grammar",
    "ebnf",
    "regex",
)
# Fields of llama.cpp and SGLang, by the kind of their constraint; `format` is Ollama's.
FOREIGN_KINDS: Mapping[str, str] = {"json_schema": "json", "grammar": "grammar", "ebnf": "grammar", "regex": "regex"}
UNSUPPORTED: Mapping[str, Refusal] = {
    "guided_decoding_backend": (("auto", "guidance"), "all grammars go through llguidance"),
    "guided_whitespace_pattern": ((), "set structured_outputs.disable_any_whitespace, or write a grammar"),
}
OWN_FIELDS = tuple(item.name for item in dataclasses.fields(StructuredOutputs))
CLOSED = {"disable_additional_properties": True}


def read_structured(fields: Fields) -> tuple[StructuredOutputs | None, dict[str, str]]:
    """Read the structure that the output must have."""
    structures = [(name, _read(fields, name)) for name in STRUCTURED_FIELDS if fields.get(name) is not None]
    requested = [(name, read) for name, read in structures if read is not None]
    if not requested:
        return None, {}
    if len(requested) > 1:
        name = requested[1][0]
        raise InvalidParameter(name, fields.get(name), f"absent together with {requested[0][0]}")
    ((_, (wanted, field_aliases)),) = requested
    try:
        return StructuredOutputs(**wanted), field_aliases
    except InvalidParameter as error:
        field = error.field or ""
        raise InvalidParameter(field_aliases.get(field, field), error.value, error.allowed) from error


def _read(fields: Fields, name: str) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the fields of `StructuredOutputs` that a field gives, and their aliases; None for any text."""
    if name == "response_format":
        return _response_format(fields)
    if name == "structured_outputs":
        return _own(fields), {}
    value, kind = fields.get(name), FOREIGN_KINDS.get(name, name.removeprefix("guided_"))
    if name == "format":
        if value == "json":
            return {"json_object": True}, {"structured_outputs.json_object": name}
        kind = "json"
        if not isinstance(value, dict):
            raise InvalidParameter(name, value, '"json" or a JSON schema')
    closed = CLOSED if name in ("format", "json_schema") else {}
    return {kind: value, **closed}, {f"structured_outputs.{kind}": name, "structured_outputs": name}


def _response_format(fields: Fields) -> tuple[dict[str, Any], dict[str, str]] | None:
    response_format = fields.object("response_format")
    assert response_format is not None
    kind = response_format.text("type")
    if kind == "text":
        return None
    described = response_format
    if kind == "json_object" and response_format.get("schema") is None:
        return {"json_object": True}, {"structured_outputs.json_object": "response_format"}
    if kind == "structural_tag":
        raise UnsupportedFeature("response_format.type", "structural tags are not read; use structured_outputs.grammar")
    if kind not in ("json_object", "json_schema"):
        raise InvalidParameter("response_format.type", kind, "text, json_object or json_schema")
    if kind == "json_schema":
        inner = response_format.object("json_schema")
        if inner is None:
            raise InvalidParameter("response_format.json_schema", None, "an object")
        described = inner
    for name in ("name", "description"):
        described.text(name)
    described.flag("strict")  # the schema is enforced either way
    schema = described.get("schema")
    if schema is None:
        return {"json_object": True}, {"structured_outputs.json_object": "response_format"}
    name = described.name("schema")
    if not isinstance(schema, dict) and schema is not True:
        raise InvalidParameter(name, schema, "an object")
    return {"json": schema, **CLOSED}, {"structured_outputs.json": name}


def _own(fields: Fields) -> dict[str, Any]:
    options = fields.object("structured_outputs")
    assert options is not None
    options.log_unknown(OWN_FIELDS)
    return {name: options.get(name) for name in OWN_FIELDS if options.get(name) is not None}
