"""The settings of a manager, as a value that can be serialised."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from quire.memory.manager import KVCacheManager
from quire.memory.specs import ChunkedLocal, FullAttention, KVCacheSpec, RecurrentState, SlidingWindow

SPECS: dict[str, type[FullAttention | SlidingWindow | ChunkedLocal | RecurrentState]] = {
    "full": FullAttention,
    "window": SlidingWindow,
    "chunked": ChunkedLocal,
    "state": RecurrentState,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """All arguments of `KVCacheManager` except for the secret key."""

    specs: tuple[KVCacheSpec, ...]
    num_blocks: int | None = None
    num_bytes: int | None = None
    watermark: int = 0
    enable_prefix_caching: bool = True
    eviction: str = "lru"
    pin_limit: int = 0
    snapshot_interval: int | None = None
    host_bytes: int = 0
    retention_limit: int = 0
    has_disk: bool = False

    def build(self, key: bytes = b"") -> KVCacheManager:
        """Return a new manager.

        Args:
            key: see `KVCacheManager`.
        """
        return KVCacheManager(**{field.name: getattr(self, field.name) for field in fields(self)}, key=key)

    def to_json(self) -> str:
        """Return the settings on one line.

        Raises:
            ValueError: the kind of a spec has no name in `SPECS`.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**values, "specs": [_spec_to_dict(spec) for spec in self.specs]})

    @classmethod
    def from_json(cls, text: str) -> MemorySettings:
        """Return the settings that `to_json` wrote.

        Raises:
            ValueError: the text is not the settings of a manager.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            specs = tuple(SPECS[spec.pop("kind")](**spec) for spec in values.pop("specs"))
            return cls(specs=specs, **values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the text is not the settings of a memory manager ({error!r})") from error


def _spec_to_dict(spec: KVCacheSpec) -> dict[str, Any]:
    for kind, spec_class in SPECS.items():
        if isinstance(spec, spec_class):
            return {"kind": kind, **asdict(spec)}
    raise ValueError(f"a cache spec must be of kind {', '.join(SPECS)}, got {spec!r}")
