"""Expansion of a conjunction of schemas into alternatives: conjunctions of parts without references or applicators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.text.schemas.document import Document, Node, SchemaError, UnenforceableSchema, parts_of
from quire.text.schemas.keywords import IN_PLACE, MAX_COUNT, REFERENCES, is_trivial, read_keywords
from quire.text.schemas.negation import OPPOSITE, negated

# Limits of the number of steps for one schema, and of alternatives of one state.
MAX_STEPS = 100_000
MAX_ALTERNATIVES = 1024
Drop = Callable[[Node, str, str], None]


class TooManyAlternatives(SchemaError):
    """A conjunction with more alternatives than a grammar can have."""


class SchemaPart(NamedTuple):
    """A part of a schema without applicators.

    Args:
        keywords: keywords that restrict values.
        node: schema with these keywords.
        owners: `id()` of the schemas that apply this part to their own value, including `node`; without schemas
            outside of a `not`.
    """

    keywords: Mapping[str, Any]
    node: Node
    owners: frozenset[int]


class Alternative(NamedTuple):
    """One alternative.

    Args:
        parts: parts that a value must meet.
        excluded: schemas that it must not meet, namely the other branches of each `oneOf`, and the schema with this
            `oneOf`.
    """

    parts: tuple[SchemaPart, ...]
    excluded: tuple[tuple[Node, Node], ...] = ()


class _Scope(NamedTuple):
    """The schemas that apply a schema to their own value.

    Args:
        within: `id()` of all of them.
        owners: see `SchemaPart`.
    """

    within: frozenset[int] = frozenset()
    owners: frozenset[int] = frozenset()


class _Choice(NamedTuple):
    """Alternatives; a value must meet one of them.

    Args:
        options: nodes of each alternative, and nodes that it excludes.
        scope: scope of the schema with the alternatives.
        origin: the schema with the alternatives.
    """

    options: Sequence[tuple[Sequence[Node], Sequence[Node]]]
    scope: _Scope
    origin: Node


class _Applied(NamedTuple):
    """A schema that a value must meet.

    Args:
        node: the schema.
        scope: scope of the schema.
    """

    node: Node
    scope: _Scope = _Scope()


_Item = SchemaPart | _Choice | _Applied


class Expander:
    """Expands conjunctions of the parts of one document."""

    def __init__(self, document: Document, drop: Drop) -> None:
        self.document = document
        self._drop = drop
        self._keywords: dict[int, dict[str, Any]] = {}
        # Schemas that were made from others, by `id()` of the origin and key, so that the same state is found again;
        # and the `id()` of each.
        self._made: dict[tuple[int, str], Node] = {}
        self._made_ids: set[int] = set()
        self._opposite_ids: set[int] = set()
        self._num_steps = 0

    def is_made(self, node: Node) -> bool:
        """Return whether a schema was made here, and is not a part of the document."""
        return id(node) in self._made_ids

    def make(self, origin: Node, key: str, content: Node) -> Node:
        """Return a schema that is made from another one; the same schema for the same origin and key."""
        made = self._made.get((id(origin), key))
        if made is None:
            made = self._made[id(origin), key] = content
            left: list[Any] = [made]
            while left:
                node = left.pop()
                if isinstance(node, Mapping) and not self.document.has(node):
                    self._made_ids.add(id(node))
                    if key.startswith(OPPOSITE):
                        self._opposite_ids.add(id(node))
                    self.document.name(node, origin)
                    left += [inner for _, inner in parts_of(node)]
        return made

    def is_opposite(self, node: Node) -> bool:
        """Return whether a schema is part of the opposite of the schema at its path."""
        return id(node) in self._opposite_ids

    def keywords(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of a schema; see `read_keywords`."""
        checked = self._keywords.get(id(node))
        if checked is None:
            # Made schemas need no check, and may have the keyword `NOT_ENUM`.
            read = (
                dict(node)
                if self.is_made(node)
                else read_keywords(node, self.document.place(node), self.document.later_keywords)
            )
            checked = self._keywords[id(node)] = read
        return checked

    def resolve(self, node: Mapping[str, Any], keyword: str) -> Node | None:
        """Return the target of a reference; None if the reference is dropped."""
        try:
            return self.document.resolve(node, keyword)
        except SchemaError as error:
            self._drop(node, keyword, str(error))
            return None

    def target(self, node: Node) -> Node:
        """Return the final target of a schema that is only a reference; any other schema unchanged."""
        seen: set[int] = set()
        while isinstance(node, Mapping) and "$ref" in node and id(node) not in seen:
            seen.add(id(node))
            if self.keywords(node).keys() != {"$ref"}:
                break
            target = self.resolve(node, "$ref")
            node = True if target is None else target
        return node

    def expand(
        self, nodes: Iterable[Node], parts: Sequence[SchemaPart] = (), *, has_choices: bool = True
    ) -> list[Alternative]:
        """Return the alternatives of a conjunction of schemas and parts; without choices if `has_choices` is False."""
        alternatives: list[Alternative] = []
        start: list[_Item] = [*parts, *map(_Applied, nodes)]
        left: list[tuple[list[_Item], Alternative, frozenset[int]]] = [(start[::-1], Alternative(()), frozenset())]
        while left:
            items, done, seen = left.pop()
            self._num_steps += 1
            if self._num_steps > MAX_STEPS:
                raise UnenforceableSchema("it has too many combinations of alternatives")
            if not items:
                alternatives.append(done)
                if len(alternatives) > MAX_ALTERNATIVES:
                    raise TooManyAlternatives(f"it has more than {MAX_ALTERNATIVES} combinations of alternatives")
                continue
            item = items.pop()
            if isinstance(item, SchemaPart):
                left.append((items, done._replace(parts=(*done.parts, item)), seen))
            elif isinstance(item, _Choice):
                if not has_choices:
                    left.append((items, done, seen))
                    continue
                # Reversed, so that the first alternative is taken from the stack first.
                for option, others in reversed(item.options):
                    applied = [_Applied(node, item.scope) for node in reversed(option)]
                    excluded = (*done.excluded, *((node, item.origin) for node in others))
                    left.append(([*items, *applied], done._replace(excluded=excluded), seen))
            elif item.node is not False and id(item.node) not in item.scope.within:
                # An alternative with a schema that applies itself is dropped: it allows no further values.
                if item.node is not True and id(item.node) not in seen:
                    items += reversed([*self._items(item.node, _inside(item.scope, item.node))])
                    seen |= {id(item.node)}
                left.append((items, done, seen))
        return alternatives

    def _items(self, node: Mapping[str, Any], scope: _Scope) -> Iterator[_Item]:
        """Yield the parts, choices and schemas of a schema in the order of its keywords, which orders properties."""
        keywords = self.keywords(node)
        own_keywords = {keyword: value for keyword, value in keywords.items() if keyword not in IN_PLACE}
        choice = self._constants(node, own_keywords)
        first = next((keyword for keyword in keywords if keyword not in IN_PLACE), "")
        part_keyword = "properties" if "properties" in own_keywords else first
        for keyword, value in keywords.items():
            if keyword == part_keyword and own_keywords:
                yield SchemaPart(own_keywords, node, scope.owners)
            elif keyword in IN_PLACE:
                yield from self._applied(node, keyword, value, scope)
        if choice:
            yield _Choice(choice, scope, node)

    def _applied(self, node: Mapping[str, Any], keyword: str, value: Any, scope: _Scope) -> Iterator[_Item]:
        """Yield the schemas or choices of an applicator."""
        if keyword in REFERENCES:
            target = self.resolve(node, keyword)
            yield from () if target is None else (_Applied(target, scope),)
        elif keyword == "allOf":
            yield from (_Applied(one, scope) for one in value)
        elif keyword == "anyOf":
            if not any(map(is_trivial, value)):
                yield _Choice([([one], ()) for one in value], scope, node)
        elif keyword == "oneOf":
            yield _Choice([([one], [*value[:idx], *value[idx + 1 :]]) for idx, one in enumerate(value)], scope, node)
        elif keyword == "not":
            opposite = negated(self, value)
            if opposite is None:
                self._drop(node, keyword, "the opposite of its schema cannot be expressed")
            else:
                yield _Applied(opposite, scope._replace(owners=frozenset()))
        elif keyword == "if":
            yield from self._condition(node, scope)
        elif keyword.startswith("depend"):
            yield from self._dependencies(node, keyword, value, scope)

    def _condition(self, node: Mapping[str, Any], scope: _Scope) -> Iterator[_Item]:
        keywords = self.keywords(node)
        condition, then, other = (keywords.get(keyword, True) for keyword in ("if", "then", "else"))
        opposite = True if is_trivial(then) else negated(self, condition)
        if opposite is None:
            self._drop(node, "if", "the opposite of its schema cannot be expressed")
        else:
            yield _Choice([([condition, then], ()), ([opposite, other], ())], scope, node)

    def _dependencies(
        self, node: Mapping[str, Any], keyword: str, value: Mapping[str, Any], scope: _Scope
    ) -> Iterator[_Item]:
        """Yield a choice for each property: it is absent, or it is present and its requirements hold."""
        for name, needed in value.items():
            names = [name] if isinstance(needed, Mapping | bool) else [name, *needed]
            absent = self.make(node, f"{keyword}-{name}", {"properties": {name: False}})
            present = self.make(node, f"{keyword}+{name}", {"type": "object", "required": [*dict.fromkeys(names)]})
            more = [needed] if isinstance(needed, Mapping | bool) else []
            yield _Choice([([absent], ()), ([present, *more], ())], scope, node)

    def _constants(
        self, node: Mapping[str, Any], keywords: dict[str, Any]
    ) -> list[tuple[Sequence[Node], Sequence[Node]]]:
        """Return the alternatives of constants that include arrays or objects, and remove these from `keywords`."""
        constants = [*keywords.pop("enum", ())] if "enum" in keywords else None
        if "const" in keywords:
            constant = keywords.pop("const")
            constants = [constant] if constants is None else [one for one in constants if is_equal(one, constant)]
        if constants is None:
            return []
        scalars = [one for one in constants if not isinstance(one, list | tuple | Mapping)]
        if len(scalars) == len(constants):
            keywords["enum"] = scalars
            return []
        options: list[Node] = [self.make(node, "scalars", {"enum": scalars})] if scalars else []
        for idx, one in enumerate(constants):
            if isinstance(one, list | tuple | Mapping):
                options.append(self.make(node, f"constant {idx}", _as_schema(one)))
        return [([option], ()) for option in options]


def _inside(scope: _Scope, node: Node) -> _Scope:
    return _Scope(scope.within | {id(node)}, scope.owners | {id(node)})


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON, in which a boolean is not a number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _as_schema(value: Any) -> Node:
    """Return the schema of one constant, an array or object."""
    if isinstance(value, list | tuple):
        return {
            "type": "array",
            "prefixItems": [{"const": one} for one in value],
            "items": False,
            "minItems": len(value),
        }
    return {
        "type": "object",
        "properties": {key: {"const": one} for key, one in value.items()},
        "required": [*value],
        "additionalProperties": False,
    }


def count_limits(parts: Sequence[SchemaPart], least: str, most: str) -> tuple[int, int | None]:
    """Return the common limits of a count in all parts; a maximum that no output reaches is None."""
    low = max((part.keywords[least] for part in parts if least in part.keywords), default=0)
    high = min((part.keywords[most] for part in parts if most in part.keywords), default=None)
    return low, None if high is not None and high > MAX_COUNT else high
