"""The modules of a model of sentence-transformers, from its `modules.json`, and the files of its dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, shown
from quire.models.families.dense_layers import ACTIVATIONS, activation_name
from quire.platform.bounded.files import read_json, reason_of

MODULES_FILE: Final = "modules.json"
WEIGHTS_FILE: Final = "model.safetensors"
MAX_BYTES: Final = 1 << 20
# Modules in the order in which they may follow each other; dense layers may be several.
ORDER: Final = ("Transformer", "Pooling", "Dense", "Normalize")


class ModuleEntry(NamedTuple):
    """A module of a model of sentence-transformers.

    Args:
        kind: last part of the name of its class.
        path: its folder.
    """

    kind: str
    path: str


def read_modules(folder: Path) -> tuple[ModuleEntry, ...] | None:
    """Return the modules of a model of sentence-transformers; None without `modules.json`.

    Raises:
        CheckpointError: the file is damaged.
    """
    modules = read_file(folder / MODULES_FILE, list)
    if modules is None:
        return None
    entries = [module for module in modules if isinstance(module, dict)]
    return tuple(ModuleEntry(str(each.get("type")).rpartition(".")[2], str(each.get("path", ""))) for each in entries)


def refusal_of(folder: Path, modules: Sequence[ModuleEntry]) -> str | None:
    """Return the reason why a model's modules are not supported; None if they are."""
    for kind, _ in modules:
        if kind not in ORDER:
            return f"{MODULES_FILE} has a module {shown(kind)}, which is not implemented"
    kinds = [ORDER.index(kind) for kind, _ in modules]
    if kinds != sorted(kinds) or any(kinds.count(ORDER.index(kind)) > 1 for kind in ORDER if kind != "Dense"):
        order = ", ".join(ORDER)
        return f"{MODULES_FILE} has its modules in an order that is not implemented: implemented is {order}"
    for _, path in (each for each in modules if each.kind == "Dense"):
        config = read_file(folder / module_path(folder, path) / "config.json", dict)
        if config is None:
            return f"the checkpoint states a dense layer of {path}/config.json, which is missing"
        reason = _refusal_of_dense(config)
        if reason is not None:
            return f"{path}/config.json has {reason}, which is not implemented"
        if not (folder / path / WEIGHTS_FILE).is_file():
            return f"{path}/{WEIGHTS_FILE} is missing, and weights are read from no other format"
    return None


def _refusal_of_dense(config: Mapping[str, Any]) -> str | None:
    allowed = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    for name, value in (*allowed.items(), ("use_residual", False)):
        if config.get(name) not in (None, value):
            return f"{name} {shown(config[name])}"
    name = activation_name(str(config.get("activation_function") or "Tanh"))
    return None if name in ACTIVATIONS else f"activation_function {shown(name)}"


def dense_configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of a model's dense layers by their folders, in order; empty if they are not supported.

    Raises:
        CheckpointError: a file is damaged.
    """
    modules = read_modules(folder) or ()
    if refusal_of(folder, modules) is not None:
        return {}
    paths = [each.path for each in modules if each.kind == "Dense"]
    return {path: read_file(folder / path / "config.json", dict) for path in paths}


def module_path(folder: Path, path: str) -> str:
    """Return the folder of a module.

    Raises:
        CheckpointError: it is not the name of a folder beside `modules.json`.
    """
    if not path.replace("_", "").isalnum():
        raise CheckpointError(f"{folder / MODULES_FILE} must name a folder for each module, got {shown(path)}")
    return path


def read_file(path: Path, kind: type) -> Any:
    """Return the content of a JSON file that holds a value of some type; None if it does not exist.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        value = read_json(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return value
