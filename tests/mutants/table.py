"""Rows of the table of mutants: the seam that a mutant patches, its bug, and the checkers that must fail on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

# Called with the honest function and its arguments.
Bug = Callable[..., Any]
Checker = Callable[[], None]


class Seam(NamedTuple):
    """A public method of a class, or a public function of a module, that a bug replaces.

    Args:
        owner: class or module that defines it.
        name: name of the method or function.
        bug: replacement, called with the honest function and its arguments.
    """

    owner: Any
    name: str
    bug: Bug

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Install the bug; a function is replaced in each module that has imported it, so callers can move."""
        honest, bug = vars(self.owner)[self.name], self.bug
        mutated: Any
        if isinstance(honest, property):
            mutated = property(lambda owner: bug(honest.fget, owner))
        else:

            def mutated(*args: Any, **options: Any) -> Any:
                return bug(honest, *args, **options)

        places = [(self.owner, self.name)]
        if not isinstance(self.owner, type):
            modules = [module for name, module in sys.modules.items() if name.startswith("quire.")]
            places = [(module, name) for module in modules for name, value in vars(module).items() if value is honest]
        for place in places:
            patch.setattr(*place, mutated)


class Mutant(NamedTuple):
    """A row of the table.

    Args:
        name: plain technical name of the bug.
        owner, attribute, bug: see `Seam`.
        checkers: checkers that must fail; the first is in the default run, the others are slow.
        more: further seams of the same bug.
    """

    name: str
    owner: Any
    attribute: str
    bug: Bug
    checkers: tuple[Checker, ...]
    more: tuple[Seam, ...] = ()

    @property
    def seams(self) -> tuple[Seam, ...]:
        """All seams of the mutant."""
        return (Seam(self.owner, self.attribute, self.bug), *self.more)


def ignored(*_: Any, **__: Any) -> None:
    """Bug: the call does nothing."""


def returning(value: object) -> Bug:
    """Return the bug of a function that returns a constant."""
    return lambda *_, **__: value


@contextmanager
def replaced(owner: Any, name: str, bug: Bug = ignored) -> Iterator[None]:
    """Install a bug for the length of a call, so that only what this call does is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        Seam(owner, name, bug).install(patch)
        yield
