"""The forms of an object that must meet several parts of a schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from quire.text.schemas.document import Node, SchemaError
from quire.text.schemas.expansion import SchemaPart, count_limits
from quire.text.schemas.forms import NEVER, Anything, Object, State, Text
from quire.text.schemas.keywords import OF_OBJECTS
from quire.text.schemas.patterns import to_rust
from quire.text.schemas.states import States

# Maximum number of sets of properties, by which `minProperties` and `maxProperties` are expressed.
MAX_SETS = 64


def objects(parts: Sequence[SchemaPart], states: States) -> list[Object]:
    """Return the forms of an object that meets all parts; none if no object does."""
    object_parts = [part for part in parts if part.keywords.keys() & {*OF_OBJECTS}]
    object_parts = [*object_parts, *_unevaluated(object_parts, states)]
    members = _Members(object_parts, states)
    return [*_counted(members.object(), object_parts, states)]


def _unevaluated(parts: Sequence[SchemaPart], states: States) -> Iterator[SchemaPart]:
    """Yield a part for each `unevaluatedProperties`, which applies to properties that its schema does not evaluate."""
    for part in parts:
        if "unevaluatedProperties" not in part.keywords:
            continue
        inner = [other.keywords for other in parts if id(part.node) in other.owners and not states.is_made(other.node)]
        if any("additionalProperties" in keywords for keywords in inner):
            continue
        names = {name: True for keywords in inner for name in keywords.get("properties", ())}
        patterns = {name: True for keywords in inner for name in keywords.get("patternProperties", ())}
        more = {"patternProperties": patterns} if patterns else {}
        additional = {"additionalProperties": part.keywords["unevaluatedProperties"]}
        yield SchemaPart({"properties": names, **more, **additional}, part.node, part.owners)


@dataclass(slots=True)
class _Members:
    """The members of an object.

    Args:
        parts: parts with keywords of objects.
        states: states of the schema.
    """

    parts: Sequence[SchemaPart]
    states: States

    def object(self) -> Object:
        """Return the object without the limits of the number of its properties."""
        required = list(dict.fromkeys(name for part in self.parts for name in part.keywords.get("required", ())))
        patterns = self._patterns()
        declared = dict.fromkeys(name for part in self.parts for name in part.keywords.get("properties", ()))
        is_closed = self._is_closed(len(declared | dict.fromkeys(required)))
        if is_closed or not patterns:
            declared |= dict.fromkeys(required)
        additional = NEVER if is_closed else self.states.state(self._additional())
        merged = Object(
            tuple((name, self.states.state(self._nodes(name))) for name in declared),
            tuple(required),
            patterns,
            additional,
        )
        return self._with_names(merged)

    def _is_closed(self, num_named: int) -> bool:
        """Return whether additional properties are excluded although the schema allows them."""
        least, _ = count_limits(self.parts, "minProperties", "maxProperties")
        keys = {key for part in self.parts for key in part.keywords}
        asks = keys & {"additionalProperties", "patternProperties", "unevaluatedProperties"}
        declares = any("properties" in part.keywords and not self.states.is_made(part.node) for part in self.parts)
        return self.states.is_closed and declares and not asks and least <= num_named

    def _nodes(self, name: str) -> list[Node]:
        """Return the schemas of a declared property, without schemas of patterns."""
        nodes: list[Node] = []
        for part in self.parts:
            declared = part.keywords.get("properties", {})
            additional = part.keywords.get("additionalProperties", True)
            if name in declared:
                nodes.append(declared[name])
            elif additional is not True and "patternProperties" in part.keywords:
                why = f"it is not known whether a pattern beside it matches {name!r}, which another part declares"
                self.states.drop(part.node, "additionalProperties", why)
            else:
                nodes.append(additional)
        return nodes

    def _additional(self) -> list[Node]:
        return [part.keywords["additionalProperties"] for part in self.parts if "additionalProperties" in part.keywords]

    def _patterns(self) -> tuple[tuple[str, State], ...]:
        """Return the states of the properties whose names match a pattern."""
        having = [part for part in self.parts if "patternProperties" in part.keywords]
        nodes: dict[str, list[Node]] = {}
        for part in having:
            for pattern, node in part.keywords["patternProperties"].items():
                try:
                    nodes.setdefault(to_rust(pattern), []).append(node)
                except SchemaError as error:
                    self.states.drop(part.node, "patternProperties", str(error))
        if having and not self.states.abilities.has_name_patterns:
            self.states.drop(having[0].node, "patternProperties", "the names of properties have no patterns here")
            nodes.clear()
        if len(nodes) > 1 and not self.states.abilities.compares_patterns and not _are_disjoint([*nodes]):
            self.states.drop(having[0].node, "patternProperties", "a name may match several of the patterns")
            nodes.clear()
        for part in self.parts:
            additional, own_patterns = (
                part.keywords.get("additionalProperties", True),
                part.keywords.get("patternProperties", {}),
            )
            others = [
                pattern
                for pattern in nodes
                if pattern not in {to_rust(one) for one in own_patterns if _is_readable(one)}
            ]
            if additional is not True and own_patterns and others:
                self.states.drop(part.node, "additionalProperties", "another part has patterns of names")
            elif additional is not True:
                for pattern in others:
                    nodes[pattern].append(additional)
        return tuple((pattern, self.states.state(pattern_nodes)) for pattern, pattern_nodes in nodes.items())

    def _with_names(self, merged: Object) -> Object:
        """Return the object with the restrictions of `propertyNames`."""
        having = [part for part in self.parts if "propertyNames" in part.keywords]
        if not having:
            return merged
        forms = self.states.forms(self.states.state([part.keywords["propertyNames"] for part in having]))
        if any(isinstance(form, Anything) or form == Text() for form in forms):
            return merged
        texts = [form for form in forms if isinstance(form, Text)]
        if not texts:
            return replace(merged, properties=tuple((name, NEVER) for name, _ in merged.properties), additional=NEVER)
        if not merged.patterns and all(_is_list(text) for text in texts):
            return self._listed(merged, [name for text in texts for name in text.constants or ()])
        restrictions = [*texts[0].patterns, *(("length",) if texts[0].min_length or texts[0].max_length else ())]
        is_simple = len(texts) == 1 and texts[0].constants is None and len(restrictions) == 1
        if merged.patterns or merged.properties or not is_simple or not self.states.abilities.has_name_patterns:
            self.states.drop(
                having[0].node, "propertyNames", "only lists of names, and one pattern of all names, can be"
            )
            return merged
        return replace(merged, names=texts[0])

    def _listed(self, merged: Object, names: Sequence[str]) -> Object:
        """Return an object with listed names only."""
        properties = [(name, state if name in names else NEVER) for name, state in merged.properties]
        declared = {name for name, _ in properties}
        further = [(name, merged.additional) for name in dict.fromkeys(names) if name not in declared]
        more = further if merged.additional != NEVER else []
        return replace(merged, properties=(*properties, *more), additional=NEVER)


def _is_list(text: Text) -> bool:
    return text.constants is not None and not text.patterns


def _is_readable(pattern: str) -> bool:
    try:
        to_rust(pattern)
    except SchemaError:
        return False
    return True


def _are_disjoint(patterns: Sequence[str]) -> bool:
    """Return True if the literal beginnings of patterns show that no name matches two of them."""
    begins = [_beginning(pattern) for pattern in patterns]
    pairs = combinations(begins, 2)
    return all(bool(a and b) and not a.startswith(b) and not b.startswith(a) for a, b in pairs)


def _beginning(pattern: str) -> str:
    """Return the literal characters with which all names that match a pattern in Rust's syntax begin."""
    length = (
        0 if "|" in pattern else next((idx for idx, char in enumerate(pattern) if not char.isalnum()), len(pattern))
    )
    # A quantifier applies to the character before it.
    return pattern[: max(length - 1, 0)] if pattern[length : length + 1] in ("*", "?", "{") else pattern[:length]


def _counted(merged: Object, parts: Sequence[SchemaPart], states: States) -> Iterator[Object]:
    """Yield objects that together allow exactly the allowed numbers of properties."""
    least, most = count_limits(parts, "minProperties", "maxProperties")
    num_required = len(merged.required)
    optional = [name for name, state in merged.properties if name not in merged.required and state != NEVER]
    is_open = merged.additional != NEVER or bool(merged.patterns)
    need = max(least - num_required, 0)
    room = None if most is None else most - num_required
    if room is not None and (room < 0 or room < need):
        return
    if not is_open:
        room = None if room is not None and room >= len(optional) else room
        yield from _sets(merged, optional, need, room, parts, states)
    elif need > 1:
        states.drop(_having(parts, "minProperties"), "minProperties", "a grammar does not see a name that comes twice")
        yield merged
    elif optional and room is not None:
        keyword = "maxProperties"
        states.drop(_having(parts, keyword), keyword, "properties that are declared and not required are not counted")
        yield merged
    elif optional and need:
        for name in optional:
            yield replace(merged, required=(*merged.required, name))
        absent = tuple((name, NEVER if name in optional else state) for name, state in merged.properties)
        yield replace(merged, properties=absent, min_others=1)
    else:
        yield replace(merged, min_others=need, max_others=room)


def _sets(
    merged: Object, optional: list[str], need: int, room: int | None, parts: Sequence[SchemaPart], states: States
) -> Iterator[Object]:
    """Yield a closed object for each set of allowed optional properties, and each set of required ones among them."""
    size = len(optional) if room is None else room
    if need > len(optional):
        return
    if comb(len(optional), size) * comb(size, need) > MAX_SETS:
        keyword = "minProperties" if need else "maxProperties"
        states.drop(_having(parts, keyword), keyword, "there are too many sets of so many properties")
        yield merged
        return
    for allowed in combinations(optional, size):
        kept = tuple(
            (name, state if name in allowed or name in merged.required else NEVER) for name, state in merged.properties
        )
        for needed in combinations(allowed, need):
            yield replace(merged, properties=kept, required=(*merged.required, *needed))


def _having(parts: Sequence[SchemaPart], keyword: str) -> Node:
    return next((part.node for part in parts if keyword in part.keywords), True)
