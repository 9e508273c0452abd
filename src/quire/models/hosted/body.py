"""The two halves of a causal language model of transformers: the layers, and the head with what follows it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

# The argument of positions of the rows.
POSITIONS: Final = "position_ids"


class _Output(tuple[Tensor]):
    """Hidden states as an output of layers: the first element, and None for all that layers may return besides."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states, [1, R, E]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenRows(nn.Module):
    """Layers that return given rows, in the place of a model's own, whose table of embeddings a model may ask for."""

    rows: Tensor

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.get_input_embeddings = getattr(replaced, "get_input_embeddings", None)

    def forward(self, *_: Any, **__: Any) -> _Output:
        """Return the rows."""
        return _Output((self.rows[None],))


class HostedHead:
    """The head of a model, and what the model does to logits: its own forward pass, with given hidden states.

    Args:
        module: causal language model.
        body: name of the module that computes hidden states.
    """

    def __init__(self, module: nn.Module, body: str) -> None:
        self._rows = _GivenRows(module.get_submodule(body))
        # Copies along the path to the layers; all other modules are shared.
        self._model = parent = copy.copy(module)
        *path, last = body.split(".")
        for name in path:
            child = copy.copy(parent.get_submodule(name))
            parent._modules = {**parent._modules, name: child}
            parent = child
        parent._modules = {**parent._modules, last: self._rows}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states [R, E]."""
        self._rows.rows = hidden
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        del self._rows.rows
        return logits


def bodies(module: nn.Module) -> Iterator[str]:
    """Yield the names of the modules that may compute a model's hidden states: from the outside to the embedding."""
    made: Any = module
    table, path, parent = made.get_input_embeddings(), "", module
    while True:
        name = next((name for name, child in parent._modules.items() if child and _holds(child, table)), None)
        if name is None or parent._modules[name] is table:
            return
        path = f"{path}.{name}".lstrip(".")
        yield path
        parent = parent.get_submodule(name)


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(each is part for each in module.modules())


def run_body(body: nn.Module, ids: Tensor, positions: Tensor, cache: Any = None, *, use_cache: bool = False) -> Any:
    """Run the layers of a model.

    Args:
        body: the module that computes hidden states.
        ids: token ids, [T].
        positions: positions, [T].
        cache: transformers' cache of earlier rows; None for none.
        use_cache: whether the output has such a cache.

    Returns:
        The module's output, whose first element has the hidden states, [1, T, E].
    """
    names = parameter_names(body)
    arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": use_cache}
    if POSITIONS in names:
        arguments[POSITIONS] = positions[None]
    if cache is not None:
        arguments["cache" if "cache" in names else "past_key_values"] = cache
    return body(**arguments)


def parameter_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a module's forward pass."""
    return _names(type(module).forward)


@cache
def _names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
