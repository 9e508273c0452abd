"""Random schemas with the features of public ones, each as often as there, and ordinary mistakes of their authors."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

DRAFTS = {"": 0.8, "http://json-schema.org/draft-07/schema#": 0.12, "http://json-schema.org/draft-04/schema#": 0.08}
NAMES = ("city", "unit", "count", "is_open", "tags", "my unit", "größe", "a/b", "x-note", "id")
WORDS = ("kg", "lb", "red", "green", "Oslo", "", 'say "x"', "née", "a\\b", "new\nline", "tab\t")
PATTERNS = (
    *("^[a-z]{1,8}$", r"^\d{2,4}$", "^(red|green|blue)$", "[A-Z]", r"^\w+$", r"^\S+@\S+$", "a|b$", "^x", "(^a|b)c"),
    *(r"^[^\s]{2,5}$", "^$|^[0-9]+$", r"^\u0041+$", r"^[\-\.]?\d+$", "^.{1,10}$", r"^\x41[\s\S]*$", r"^(?:a{2}|b)+$"),
)
SLASHED = (r"^\d{2}\/\d{2}$", r"^https?:\/\/\w+", r"^[\/\w]+$", "a/b")
REFUSED_PATTERNS = (r"^(?!admin)[a-z]+$", r"\bfox\b", r"^(a)\1$", r"(?<=a)b", r"^(?!\.)[a-z.]+@[a-z]+$", "a^b", "(")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "uri-reference")
ANNOTATIONS = ("password", "binary", "path", "int32", "double", "mongoId")
SCALARS = (0, 1, -3, 2.5, True, False, None, "kg", "", "née", 0.1, 12)


class SchemaMaker:
    """Makes schemas.

    Args:
        seed: seed of all random choices.
    """

    def __init__(self, seed: object) -> None:
        self.rng = Random(str(seed))
        self._draft = ""
        self._definitions: dict[str, None] = {}

    def schema(self) -> dict[str, Any]:
        """Return a schema of an object, as tools have."""
        rng = self.rng
        self._draft = rng.choices([*DRAFTS], [*DRAFTS.values()])[0]
        self._definitions = dict.fromkeys(rng.sample(("n", "l", "node", "my unit", "U"), rng.randrange(4)))
        made = {name: self._definition(name) for name in self._definitions}
        found = self._object(0)
        if self._draft:
            found = {"$schema": self._draft, **found}
        return found | ({self._keyword_of_definitions: made} if made else {})

    @property
    def _keyword_of_definitions(self) -> str:
        return "definitions" if self._draft else "$defs"

    @property
    def _is_oldest(self) -> bool:
        """True for draft 4, which lacks keywords."""
        return "draft-04" in self._draft

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _definition(self, name: str) -> dict[str, Any]:
        if name == "node":
            return {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 5}, "next": self._reference("node")},
                "required": ["name"],
                "additionalProperties": False,
            }
        if name == "l":
            return {"anyOf": [{"enum": ["kg", "lb"]}, {"type": "null"}]}
        if name == "U":
            keyword, name = {"": ("$anchor", "unit"), "07": ("$id", "#unit"), "04": ("id", "#unit")}[
                self._draft[-10:-8]
            ]
            return {keyword: name, "enum": ["kg"]}
        return {"type": "integer", "minimum": 0, "maximum": 9}

    def _reference(self, name: str) -> dict[str, Any]:
        path = f"#/{self._keyword_of_definitions}/{name.replace(' ', '%20')}"
        if name == "l" and self._chance(0.3):
            path += "/anyOf/0"
        if name == "U" and self._chance(0.5):
            path = "#unit"
        return {"$ref": path}

    def value(self, depth: int) -> Any:
        """Return a schema of any value."""
        rng = self.rng
        if self._definitions and self._chance(0.12):
            found = self._reference(rng.choice([*self._definitions]))
            if not self._draft and self._chance(0.3):
                found |= rng.choice(({"minimum": 3}, {"type": "string"}, {"description": "x"}, {"maxLength": 4}))
            return found
        if self._chance(0.03):
            return rng.choice(({} if self._is_oldest else True, {}, {"description": "any"}))
        if self._chance(0.02):
            return rng.choice(({"$ref": "https://example.com/x.json"}, {"$ref": "#/nowhere"}))
        makers: list[Callable[[int], dict[str, Any]]] = [
            self._text,
            self._text,
            self._number,
            self._boolean,
            self._enum,
            self._types,
        ]
        if depth < 3:
            makers += [self._object, self._array, self._combined, self._object, self._array]
        found = rng.choice(makers)(depth)
        if self._chance(0.3):
            found |= {"title": "T", "description": "An x.", "default": None}
        if self._chance(0.02):
            found["x-vendor"] = {"minimum": 3}
        return found

    def _text(self, _depth: int) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"type": "string"}
        if self._chance(0.18):
            found["pattern"] = rng.choice(SLASHED if self._chance(0.08) else PATTERNS)
        if self._chance(0.02):
            found["pattern"] = rng.choice(REFUSED_PATTERNS)
        if self._chance(0.12):
            found["format"] = rng.choice(ANNOTATIONS if self._chance(0.3) else FORMATS)
        elif self._chance(0.25):
            found["maxLength"] = rng.choice((3, 8, 20.0, 2**40))
        if self._chance(0.1) and "format" not in found:
            found["minLength"] = rng.choice((0, 1, 2))
        if self._chance(0.005):
            found["format"] = "regex"
        return found

    def _number(self, _depth: int) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"type": rng.choice(("integer", "integer", "number"))}
        if self._chance(0.35):
            found["minimum"] = rng.choice((0, 1, -5, 0.5, -1e30, -(2**63), 2**53 + 1 if self._chance(0.1) else 3))
        if self._chance(0.25):
            found["maximum"] = rng.choice((10, 99, 4.5, 2**63 - 1, 2**64, 1e300))
        if self._chance(0.08):
            found["exclusiveMinimum"] = rng.choice((True, False)) if self._is_oldest else rng.choice((0, -0.5, 5e-324))
        if self._chance(0.08):
            found["multipleOf"] = rng.choice((2, 5, 0.5, 0.01, 0.07, 10, 1e-300))
        return found

    def _boolean(self, _depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _enum(self, _depth: int) -> dict[str, Any]:
        rng = self.rng
        if self._chance(0.1):
            options = rng.sample(("kg", "lb", "red", 0, 1, None, True), 3)
            return {"enum": options, "not": {"type": rng.choice(("string", "integer")), "enum": options[:2]}}
        if self._chance(0.2) and not self._is_oldest:
            return {"const": rng.choice((*SCALARS, {"a": 1}, [1, "x"]))}
        values: list[Any] = rng.sample(WORDS if self._chance(0.7) else SCALARS, rng.randrange(1, 5))
        more = rng.choice(
            ({}, {"type": "string"}, {"type": ["string", "null"]}, {"maxLength": 3}, {"pattern": "^[a-z]"})
        )
        if self._chance(0.05):
            values.append(rng.choice(({"a": [1]}, [], [True])))
        return {"enum": values, **(more if any(isinstance(one, str) and one for one in values) else {})}

    def _types(self, _depth: int) -> dict[str, Any]:
        kinds = self.rng.sample(("string", "integer", "number", "boolean", "null", "array", "object"), 2)
        return {"type": kinds} | ({"maxLength": 6} if self._chance(0.3) else {})

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"type": "array"}
        if self._chance(0.9):
            found["items"] = self.value(depth + 1)
        if self._chance(0.15):
            found["maxItems"] = 1 if self._chance(0.4) else rng.choice((0, 2, 3.0, 5, 2**53))
        if self._chance(0.12):
            found["minItems"] = rng.choice((0, 1, 2))
        if self._chance(0.05):
            found["uniqueItems"] = rng.choice((False, False, True))
        if self._chance(0.03):
            found |= rng.choice(
                ({"minContains": 1}, {"contains": {"type": "string"}}, {"contains": True, "minContains": 0})
            )
        if self._chance(0.08):
            listed = [self.value(depth + 1) for _ in range(rng.randrange(1, 3))]
            if self._draft:
                found["items"] = listed
                found |= {"additionalItems": rng.choice((False, True, {"type": "string"}))} if self._chance(0.5) else {}
            else:
                found["prefixItems"] = listed
                found |= {"items": False} if self._chance(0.4) else {}
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = rng.sample(NAMES, rng.choice((0, 1, 1, 2, 2, 3, 4)))
        found: dict[str, Any] = {"type": "object"}
        if names or self._chance(0.5):
            found["properties"] = {name: self.value(depth + 1) for name in names}
        required = [name for name in names if self._chance(0.5)]
        if self._chance(0.012):
            required.append(rng.choice(("undeclared", "unit")))
        if required or self._chance(0.1):
            found["required"] = [*dict.fromkeys(required)]
        if self._chance(0.45):
            found["additionalProperties"] = False if self._chance(0.75) else rng.choice((True, self.value(depth + 1)))
        self._add_rare(found, names, depth)
        return found

    def _add_rare(self, found: dict[str, Any], names: list[str], depth: int) -> None:
        rng = self.rng
        if self._chance(0.03):
            found["patternProperties"] = rng.choice(
                ({"^x-": {}}, {"^[ab]$": {"enum": [1]}}, {"^a": {"type": "string"}, "^b": {}}, {"^a": {}, "b$": {}})
            )
        if self._chance(0.03):
            found[rng.choice(("minProperties", "maxProperties"))] = rng.choice((0, 1, 2, 3))
        if self._chance(0.02) and not self._is_oldest:
            found["propertyNames"] = rng.choice(
                ({"type": "string"}, {"pattern": "^[a-z]+$"}, {"enum": ["city", "unit"]}, {"maxLength": 4})
            )
        if self._chance(0.02) and names:
            found["dependencies" if self._draft else "dependentRequired"] = rng.choice(
                ({}, {names[0]: [rng.choice(NAMES)]})
            )
        if self._chance(0.02) and not self._draft:
            found["unevaluatedProperties"] = False
        if self._chance(0.05) and names:
            one = [{"required": [rng.choice(names)]} for _ in range(2)]
            found[rng.choice(("anyOf", "oneOf", "allOf"))] = one
        if self._chance(0.02) and names and not self._is_oldest:
            condition: dict[str, Any] = {"properties": {names[0]: {"const": "kg"}}, "required": [names[0]]}
            found["if"] = condition
            found |= {"then": {"required": names[-1:]}} if self._chance(0.7) else {}
        if self._chance(0.01) and depth < 2:
            found["not"] = rng.choice(
                ({"required": ["id"]}, {"type": "string"}, {"minProperties": 9}, {"pattern": "a"})
            )

    def _combined(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        keyword = rng.choices(("anyOf", "oneOf", "allOf"), (0.5, 0.3, 0.2))[0]
        if self._chance(0.25):
            return {"type": "integer", "minimum": 3, keyword: [{"maximum": 5}, {"minimum": rng.choice((4, 20))}]}
        count = 1 if keyword == "allOf" and self._chance(0.5) else 2
        found = {keyword: [self.value(depth + 1) for _ in range(count)]}
        return {"type": "string", **found} if self._chance(0.1) else found
