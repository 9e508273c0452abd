"""A JSON schema as a document: its parts, their paths, and the targets of references.

Source: JSON Schema, draft 2020-12, sections 8.2 and 9; `id`, `definitions` and anchors in `$id` are from earlier
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# A schema, or a part of one: an object of keywords, or true (any value) or false (none).
Node = Mapping[str, Any] | bool

# Keywords whose value is an object of schemas, a schema or a list of schemas.
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
NODES = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    }
)


OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
# Drafts -> keywords that they do not define, which would allow more values than the schema if they were read.
LATER_KEYWORDS = {
    OLD_DRAFTS: frozenset({"minContains", "maxContains", "prefixItems"}),
    ("draft/2019-09",): frozenset({"prefixItems"}),
}


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the path, the keyword and the reason."""


class UnenforceableSchema(SchemaError):
    """A schema of which nothing can be enforced: no value meets it, or it is too large."""


class Document:
    """The parts of a schema by their paths, anchors and URIs."""

    def __init__(self, root: Node) -> None:
        self.root = root
        # By the `id()` of a part: its path, and the URI of its resource.
        self._places: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Node] = {"": root}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._num_dynamic: dict[str, int] = {}
        draft = str(root.get("$schema")) if isinstance(root, Mapping) else ""
        self._is_old = any(name in draft for name in OLD_DRAFTS)
        later = (keywords for names, keywords in LATER_KEYWORDS.items() if any(name in draft for name in names))
        self.later_keywords = next(later, frozenset[str]())
        self._add(root, "", "")

    def place(self, node: Node) -> str:
        """Return the path of a part, such as `properties.city`; "" for the root and for unknown objects."""
        return self._places.get(id(node), "")

    def has(self, node: Node) -> bool:
        """Return whether a part has a path in the document, or was given one by `name`."""
        return id(node) in self._places

    def name(self, made: Node, origin: Node) -> None:
        """Give a part that was made from another one the path of its origin."""
        self._places[id(made)] = self.place(origin)
        self._bases[id(made)] = self._bases.get(id(origin), "")

    def resolve(self, node: Mapping[str, Any], keyword: str) -> Node:
        """Return the target of a reference."""
        reference = node[keyword]
        if not isinstance(reference, str):
            raise SchemaError("it is not a string")
        base = self._bases.get(id(node), "")
        uri, fragment = urldefrag(_joined(base, reference))
        if keyword == "$recursiveRef" and len(self._resources) > 1:
            raise SchemaError("its target depends on the schema that refers to this one")
        if keyword == "$dynamicRef" and self._num_dynamic.get(fragment, 0) > 1:
            raise SchemaError(f"several parts have the $dynamicAnchor {fragment!r}")
        resource = self._resources.get(uri)
        if resource is None:
            raise SchemaError(f"it names another document, {reference!r}")
        target = self._anchors.get((uri, fragment)) if fragment and not fragment.startswith("/") else None
        if target is None and (not fragment or fragment.startswith("/")):
            target = self._by_pointer(resource, uri, fragment)
        if target is None:
            raise SchemaError(f"no part of the schema is {reference!r}")
        return target

    def _by_pointer(self, resource: Node, base: str, pointer: str) -> Node | None:
        target: Any = resource
        for step in pointer.split("/")[1:] if pointer != "/" else ():
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(key)] if key.isascii() and key.isdigit() and int(key) < len(target) else None
            else:
                target = target.get(key) if isinstance(target, Mapping) else None
        node: Node | None = target if isinstance(target, Mapping | bool) else None
        if isinstance(node, Mapping) and id(node) not in self._places:
            self._add(node, pointer.strip("/").replace("/", "."), base)
        return node

    def _add(self, node: Node, path: str, base: str) -> None:
        """Record a part and all parts in it."""
        left: list[tuple[Any, str, str]] = [(node, path, base)]
        while left:
            part, path, base = left.pop()
            if not isinstance(part, Mapping) or id(part) in self._places:
                continue
            base = self._add_names(part, base)
            self._places[id(part)], self._bases[id(part)] = path, base
            left += [(inner, f"{path}.{key}" if path else key, base) for key, inner in parts_of(part)]

    def _add_names(self, part: Mapping[str, Any], base: str) -> str:
        """Record the URI and the anchors of a part, and return the base URI of its references."""
        schema_id = part.get("$id", part.get("id"))
        # Earlier drafts ignore keywords beside a reference.
        if isinstance(schema_id, str) and schema_id and not (self._is_old and "$ref" in part):
            uri, fragment = urldefrag(_joined(base, schema_id))
            if fragment and not fragment.startswith("/"):
                self._anchors.setdefault((uri, fragment), part)
            if uri != base:
                base = uri
                self._resources.setdefault(base, part)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = part.get(keyword)
            if isinstance(name, str):
                self._anchors.setdefault((base, name), part)
                if keyword == "$dynamicAnchor":
                    self._num_dynamic[name] = self._num_dynamic.get(name, 0) + 1
        return base


def parts_of(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in the keywords of a part, with their paths in it."""
    for keyword, value in part.items():
        if keyword in MAPS and isinstance(value, Mapping):
            yield from ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in NODES and isinstance(value, list):
            yield from ((f"{keyword}[{idx}]", inner) for idx, inner in enumerate(value))
        elif keyword in NODES:
            yield keyword, value


def _joined(base: str, reference: str) -> str:
    """Return a reference resolved against a base URI."""
    if reference.startswith("#"):
        return urldefrag(base)[0] + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # brackets without an IP address
        return reference
