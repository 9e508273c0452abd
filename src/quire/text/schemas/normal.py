"""Conversion of a schema to its normal form, for answers and for the arguments of tools in every format.

Reading order: document (parts and references), keywords (one part), expansion (alternatives), merging and
object_merging (forms), this module (states), disjoint (`oneOf`), as_json (the schema of the normal form).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.text.schemas.disjoint import are_disjoint
from quire.text.schemas.document import Document, Node, SchemaError, UnenforceableSchema
from quire.text.schemas.expansion import Alternative, Expander, TooManyAlternatives
from quire.text.schemas.forms import ANY, NEVER, Anything, Array, Dropped, Form, NormalSchema, Object, State
from quire.text.schemas.keywords import is_trivial
from quire.text.schemas.merging import merge
from quire.text.schemas.negation import negated
from quire.text.schemas.states import Abilities

# Limits of the work for one schema: the number of states, and the number of lookups.
MAX_STATES, MAX_WORK = 20_000, 60_000
# Maximum nesting of states whose forms are computed to compare the branches of a `oneOf`.
MAX_NESTED = 8
JSON = Abilities()


def normalise(schema: Node, *, is_closed: bool, is_strict: bool, abilities: Abilities = JSON) -> NormalSchema:
    """Return a schema in normal form."""
    if not isinstance(schema, Mapping | bool):
        raise SchemaError("a schema is an object, true or false")
    try:
        return _Normaliser(schema, is_closed=is_closed, is_strict=is_strict, abilities=abilities).run()
    except RecursionError as error:
        raise UnenforceableSchema("it nests too deeply") from error


class _Normaliser:
    """The states of one schema; see `States`."""

    def __init__(self, root: Node, *, is_closed: bool, is_strict: bool, abilities: Abilities) -> None:
        self.abilities = abilities
        self.is_closed = is_closed
        self._is_strict = is_strict
        self._root = root
        self._expander = Expander(Document(root), self.drop)
        self._numbers: dict[tuple[bool, tuple[int, ...]], State] = {}
        # By state: its schemas and whether its objects are closed; and its forms.
        self._nodes: list[tuple[Sequence[Node], bool]] = [((), False), ((), False)]
        self._forms: dict[State, tuple[Form, ...]] = {ANY: (Anything(),), NEVER: ()}
        self._open: list[State] = []
        self._dropped: dict[Dropped, None] = {}
        self._work = 0

    def run(self) -> NormalSchema:
        """Return the normal form of the schema."""
        root = self.state([self._root])
        done = 0
        while done < len(self._nodes):
            self.forms(done)
            done += 1
        states = _possible([self._forms[state] for state in range(len(self._nodes))])
        if not states[root]:
            raise UnenforceableSchema("no value meets it")
        return NormalSchema(root, states, tuple(self._dropped))

    # ---- the interface of `States` ----

    def state(self, nodes: Sequence[Node]) -> State:
        """Return the state of a conjunction of schemas."""
        self._count()
        nodes_by_id = {id(node): node for node in map(self._expander.target, nodes) if not is_trivial(node)}
        if not nodes_by_id:
            return ANY
        if any(node is False for node in nodes_by_id.values()):
            return NEVER
        key = self.is_closed, tuple(nodes_by_id)
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(((*nodes_by_id.values(),), self.is_closed))
        return self._numbers[key]

    def forms(self, state: State) -> tuple[Form, ...]:
        """Return the forms of a state; any value if its forms are being computed, or states nest too deeply."""
        self._count()
        cached = self._forms.get(state)
        if cached is not None:
            return cached
        if state in self._open or len(self._open) > MAX_NESTED:
            return (Anything(),)
        self._open.append(state)
        nodes, is_closed = self._nodes[state]
        before, self.is_closed = self.is_closed, is_closed
        try:
            forms = self._find(nodes)
        finally:
            self.is_closed = before
            self._open.pop()
        self._forms[state] = forms
        return forms

    def is_made(self, node: Node) -> bool:
        """Return whether a schema was made, and is not a part of the document."""
        return self._expander.is_made(node)

    def drop(self, node: Node, keyword: str, reason: str) -> None:
        """Leave out a keyword that cannot be enforced; raise an error if the schema is strict."""
        path = self._expander.document.place(node)
        if self._expander.is_opposite(node):
            # Its path is the path of the negated schema, such as `properties.a.not`.
            path, _, keyword = path.rpartition(".")
            keyword = keyword.partition("[")[0]
        dropped = Dropped(path, keyword, reason)
        if self._is_strict:
            raise SchemaError(str(dropped))
        self._dropped[dropped] = None

    def _count(self) -> None:
        self._work += 1
        if self._work > MAX_WORK or len(self._nodes) > MAX_STATES:
            raise UnenforceableSchema("it has too many combinations of its parts")

    # ---- forms ----

    def _find(self, nodes: Sequence[Node]) -> tuple[Form, ...]:
        forms: dict[Form, None] = {}
        for alternative in self._expand(nodes):
            forms |= dict.fromkeys(self._merged(alternative))
        anything = Anything()
        return (anything,) if anything in forms else tuple(forms)

    def _expand(self, nodes: Sequence[Node]) -> list[Alternative]:
        try:
            return self._expander.expand(nodes)
        except TooManyAlternatives as error:
            self.drop(nodes[0], "anyOf", str(error))
            return self._expander.expand(nodes, has_choices=False)

    def _merged(self, alternative: Alternative) -> list[Form]:
        """Return the forms of an alternative, without the values that it excludes."""
        forms = merge(alternative.parts, self)
        further: list[Node] = []
        for node, origin in alternative.excluded:
            if self._are_disjoint(forms, node):
                continue
            opposite = negated(self._expander, node)
            if opposite is None:
                self.drop(origin, "oneOf", "a value may meet several of its schemas; anyOf allows that")
            else:
                further.append(opposite)
        if not further:
            return forms
        exclusive = self._expander.expand(further, alternative.parts)
        return [form for one in exclusive for form in merge(one.parts, self)]

    def _are_disjoint(self, forms: Sequence[Form], node: Node) -> bool:
        """Return whether no value of the forms meets a schema, whose objects are open here, as the client sent it."""
        before, self.is_closed = self.is_closed, False
        try:
            others = self.forms(self.state([node]))
        finally:
            self.is_closed = before
        return all(are_disjoint(form, other, self) for form in forms for other in others)


def _possible(states: list[tuple[Form, ...]]) -> list[tuple[Form, ...]]:
    """Return the forms of all states, without forms that no finite value has (in recursive schemas)."""
    possible: set[State] = set()
    is_growing = True
    while is_growing:
        next_possible = {
            state for state, forms in enumerate(states) if any(_is_possible(form, possible) for form in forms)
        }
        is_growing = len(next_possible) > len(possible)
        possible = next_possible
    return [tuple(form for form in forms if _is_possible(form, possible)) for forms in states]


def _is_possible(form: Form, possible: set[State]) -> bool:
    if isinstance(form, Array):
        needed = [*form.prefix[: form.min_items], *([form.items] if form.min_items > len(form.prefix) else [])]
        return possible.issuperset(needed)
    if isinstance(form, Object):
        declared = dict(form.properties)
        others = {state for _, state in form.patterns} | {form.additional}
        has_others = bool(others & possible) or not form.min_others
        return has_others and all(declared[name] in possible for name in form.required if name in declared)
    return True
