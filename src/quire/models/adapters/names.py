"""Names of modules in checkpoints and adapters."""

from __future__ import annotations

import re
from typing import Final

# Outer modules of the language model, in names of modules.
_OUTER: Final = frozenset({"backbone", "base_model", "model", "language_model"})
# Modules that were renamed between versions of transformers.
_ROUTER_LAYER = re.compile(r"\.router\.layer\Z")


def module_key(name: str) -> str:
    """Return a module's name within the language model.

    Checkpoints and models in memory have different prefixes, and versions of transformers different names of some
    modules of experts: `block_sparse_moe` is `mlp`, and the layer of a router is the router.
    """
    parts = name.split(".")
    start = next((idx for idx, part in enumerate(parts) if part not in _OUTER), 0)
    return _ROUTER_LAYER.sub(".router", ".".join(parts[start:]).replace(".block_sparse_moe.", ".mlp."))
