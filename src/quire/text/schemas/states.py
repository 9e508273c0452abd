"""Interfaces to the states and parts of a schema, for the functions that make forms from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quire.text.schemas.document import Node
from quire.text.schemas.forms import Form, State


class Abilities(NamedTuple):
    """Features of schemas that a kind of grammar supports.

    Args:
        has_name_patterns: True if names of properties may be restricted by regular expressions.
        compares_patterns: True if overlapping patterns of names are detected and refused by the grammar's compiler.
    """

    has_name_patterns: bool = True
    compares_patterns: bool = False


class States(Protocol):
    """The states of a schema.

    Attributes:
        abilities: features that the grammars support.
        is_closed: True if objects have declared properties only, unless the schema mentions others.
    """

    abilities: Abilities
    is_closed: bool

    def state(self, nodes: Sequence[Node]) -> State:
        """Return the state of a conjunction of schemas."""

    def forms(self, state: State) -> tuple[Form, ...]:
        """Return the forms of a state."""

    def is_made(self, node: Node) -> bool:
        """Return whether a schema was made, and is not a part of the document."""

    def drop(self, node: Node, keyword: str, reason: str) -> None:
        """Leave out a keyword that cannot be enforced."""


class Parts(Protocol):
    """The parts of a schema, and schemas that are made from them."""

    def keywords(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keywords of a schema; see `read_keywords`."""

    def resolve(self, node: Mapping[str, Any], keyword: str) -> Node | None:
        """Return the target of a reference; None if the reference is dropped."""

    def make(self, origin: Node, key: str, content: Node) -> Node:
        """Return a schema that is made from another one; the same schema for the same origin and key."""
