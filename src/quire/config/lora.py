"""Options of low-rank adapters (LoRA)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Final

from quire.config.checks import OWN, check_flag, check_whole
from quire.errors import ConfigError, shown

MAX_RANK: Final = 512
DEFAULT_MAX_RANK: Final = 16
DEFAULT_MAX_ADAPTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters in PEFT's folder format, which requests select by name.

    Args:
        enable_lora: serve adapters in addition to the model.
        lora_modules: adapters that are loaded at start, "name=path" or a JSON object with `name` and `path`; in Python
            also a mapping of paths by name.
        max_lora_rank: maximum rank of an adapter, 1 to 512.
        max_cpu_loras: maximum number of loaded adapters, all of which may be in one step. None takes 64.
        merge_lora: merge the single adapter of `lora_modules` into the weights while they are loaded, and serve the
            merged model under the adapter's name instead of the model; steps cost as much as without an adapter.
    """

    enable_lora: bool = False
    lora_modules: tuple[str, ...] = field(default=(), metadata={"nargs": "+", **OWN})
    max_lora_rank: int = DEFAULT_MAX_RANK
    max_cpu_loras: int | None = None
    merge_lora: bool = False

    def __post_init__(self) -> None:
        check_flag("enable_lora", self.enable_lora)
        check_flag("merge_lora", self.merge_lora)
        check_whole("max_lora_rank", self.max_lora_rank, 1, MAX_RANK)
        check_whole("max_cpu_loras", self.max_cpu_loras, 1, optional=True)
        pairs = tuple(_pairs(self.lora_modules))
        object.__setattr__(self, "lora_modules", tuple(f"{name}={path}" for name, path in pairs))
        if self.merge_lora:
            self._check_merge(len(pairs))
        elif pairs and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora, or merge_lora for a single one", field="lora_modules")
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(f"lora_modules must have each name once, got {shown(names)}", field="lora_modules")
        if len(names) > self.max_adapters:
            raise ConfigError(
                f"lora_modules has {len(names)} adapters, and max_cpu_loras is {self.max_adapters}; raise it",
                field="max_cpu_loras",
            )

    def _check_merge(self, num_adapters: int) -> None:
        if self.enable_lora:
            raise ConfigError(
                "merge_lora leaves no model to serve other adapters beside: leave enable_lora out, or merge_lora",
                field="merge_lora",
            )
        if num_adapters != 1:
            raise ConfigError(
                f"merge_lora needs exactly one adapter in lora_modules, got {num_adapters}", field="merge_lora"
            )

    @property
    def merged(self) -> tuple[str, str] | None:
        """Name and path of the adapter that is merged into the weights; None for none."""
        return next(iter(self.adapters.items())) if self.merge_lora else None

    @property
    def adapters(self) -> dict[str, str]:
        """Paths of the adapters that are loaded at start, by name."""
        return dict(_pairs(self.lora_modules))

    @property
    def max_adapters(self) -> int:
        """Maximum number of loaded adapters."""
        return DEFAULT_MAX_ADAPTERS if self.max_cpu_loras is None else self.max_cpu_loras


def _pairs(modules: Any) -> Iterator[tuple[str, str]]:
    """Yield name and path of each adapter of the option's value."""
    if isinstance(modules, Mapping):
        modules = [modules] if {"name", "path"} <= modules.keys() else [f"{k}={fspath(v)}" for k, v in modules.items()]
    if isinstance(modules, str):
        modules = [modules]
    if not isinstance(modules, list | tuple):
        raise _bad(modules)
    for module in modules:
        value = module
        if isinstance(module, str) and module.lstrip().startswith(("{", "[")):
            try:
                value = json.loads(module)
            except ValueError:
                raise _bad(module) from None
            if isinstance(value, list):
                yield from _pairs(value)
                continue
        if isinstance(value, str):
            name, _, path = value.partition("=")
            value = {"name": name, "path": path}
        if not isinstance(value, Mapping) or not _is_text(value.get("name")) or not _is_text(value.get("path")):
            raise _bad(module)
        yield value["name"], fspath(value["path"])


def _is_text(value: object) -> bool:
    return isinstance(value, str | PathLike) and bool(fspath(value))


def _bad(value: object) -> ConfigError:
    allowed = 'texts "name=path", or objects with name and path'
    return ConfigError(f"lora_modules must be {allowed}, got {shown(value)}", field="lora_modules")
