"""The interfaces between the states and the parts of a schema, and the functions that make forms of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quire.text.schemas.document import Node
from quire.text.schemas.forms import Form, State


class Abilities(NamedTuple):
    """Abilities of the grammars that a schema is enforced with.

    Args:
        has_name_patterns: True where names of properties may be restricted by regular expressions.
        compares_patterns: True where patterns of names that overlap are found and refused.
    """

    has_name_patterns: bool = True
    compares_patterns: bool = False


class States(Protocol):
    """The states of a schema.

    Attributes:
        abilities: abilities of its grammars.
        is_closed: True where an object has no other properties than its declared ones, unless it asks for them.
    """

    abilities: Abilities
    is_closed: bool

    def state(self, nodes: Sequence[Node]) -> State:
        """Return the state of some schemas that a value must all meet."""

    def forms(self, state: State) -> tuple[Form, ...]:
        """Return the forms of a state."""

    def is_made(self, node: Node) -> bool:
        """Return whether a schema is none of the document's."""

    def drop(self, node: Node, keyword: str, reason: str) -> None:
        """Leave a keyword out that cannot be enforced."""


class Parts(Protocol):
    """The parts of a schema, and those that are made from them."""

    def keywords(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keywords of a schema; see `read_keywords`."""

    def resolve(self, node: Mapping[str, Any], keyword: str) -> Node | None:
        """Return the schema that a reference names; None where it is dropped."""

    def make(self, origin: Node, key: str, content: Node) -> Node:
        """Return a schema that is made from another one, the same one for the same key."""
