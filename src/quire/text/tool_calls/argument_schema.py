"""The schema of a function's arguments in normal form; keywords that cannot be enforced are dropped, or refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import lru_cache

from quire.errors import InvalidParameter, shown
from quire.text.schemas.as_json import JSON_COMPILER
from quire.text.schemas.document import SchemaError, UnenforceableSchema
from quire.text.schemas.forms import Anything, Array, Boolean, Form, NormalSchema, Null, Number, Object, Text
from quire.text.schemas.normal import JSON, normalise
from quire.text.schemas.states import Abilities
from quire.text.tool_calls.calls import Function

# Agents list the same tools in every request.
NUM_CACHED = 512
MAX_NAMED = 8
EVERY: tuple[Form, ...] = (Null(), Boolean(), Number(), Text(), Array(), Object())
ANY_ARGUMENTS = NormalSchema(2, ((Anything(),), (), (Object(),)))
logger = logging.getLogger(__name__)


def argument_schema(function: Function, abilities: Abilities | None = None) -> NormalSchema:
    """Return the schema of a function's arguments, whose forms are objects."""
    if abilities is None:
        abilities = JSON_COMPILER if function.is_strict else JSON
    try:
        text = json.dumps(function.parameters, ensure_ascii=False)
        return _normal_form(text, function.name, function.is_strict, abilities)
    except SchemaError as error:
        allowed = f"a JSON schema that compiles: {error}"
        raise InvalidParameter(function.field, function.parameters, allowed) from error


def read_schema(function: Function, abilities: Abilities) -> NormalSchema:
    """Return the supported parts of a schema, for parsing arguments; any arguments if the schema is not valid."""
    try:
        return argument_schema(replace(function, is_strict=False), abilities)
    except InvalidParameter:
        return ANY_ARGUMENTS


def forms_of(schema: NormalSchema, state: int) -> tuple[Form, ...]:
    """Return the forms of a state; if it allows any value, one form for each type."""
    forms = schema.forms(state)
    return EVERY if any(isinstance(form, Anything) for form in forms) else forms


def objects_of(schema: NormalSchema) -> list[Object]:
    """Return the forms of the object of arguments."""
    return [form for form in forms_of(schema, schema.root) if isinstance(form, Object)]


def types_of(schema: NormalSchema, name: str | None) -> frozenset[str]:
    """Return the names of the types that an argument may have; `name` None stands for all that are not declared."""
    kinds: set[str] = set()
    forms = objects_of(schema)
    for form in forms:
        declared = dict(form.properties)
        states = [declared.get(name, form.additional) if name is not None else form.additional]
        # A name that this form does not declare may be declared by another one.
        states += declared.values() if name is None and len(forms) > 1 else ()
        kinds.update(_type_of(one) for state in states for one in forms_of(schema, state))
    return frozenset(kinds or map(_type_of, EVERY))


def _type_of(form: Form) -> str:
    if isinstance(form, Number):
        only_integers = form.is_integer or (
            form.constants is not None and all(type(one) is int for one in form.constants)
        )
        return "integer" if only_integers else "number"
    names = {Null: "null", Boolean: "boolean", Text: "string", Array: "array", Object: "object"}
    return names[type(form)]


@lru_cache(NUM_CACHED)
def _normal_form(text: str, name: str, is_strict: bool, abilities: Abilities) -> NormalSchema:
    """Return the normal form of a schema, and log dropped keywords."""
    # Arguments are an object, even if the schema has no type.
    schema = {"type": "object", **json.loads(text)}
    try:
        normal = normalise(schema, is_closed=True, is_strict=is_strict, abilities=abilities)
    except UnenforceableSchema as error:
        if is_strict:
            raise
        logger.warning("the schema of the tool %s is not enforced, since %s", name, error)
        return ANY_ARGUMENTS
    if normal.dropped:
        named = "; ".join(shown(str(one)) for one in normal.dropped[:MAX_NAMED])
        more = f"; and {len(normal.dropped) - MAX_NAMED} more" if len(normal.dropped) > MAX_NAMED else ""
        logger.warning("the schema of the tool %s is enforced without some keywords: %s%s", name, named, more)
    return normal
