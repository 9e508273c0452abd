"""Writes docs/models.md, what is served of transformers' causal language models: python -m tools.models_page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import transformers

from quire.errors import QuireError
from quire.models.families import FAMILIES
from quire.models.hosted.trial import examine
from tests.hosted.small_configs import MODEL_TYPES, small_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models of transformers {version}

`python -m tools.models_page` writes this page, and a slow test compares the two. It has each entry of the mapping of
causal language models of transformers {version}, by what `--model-impl auto` does with a small configuration of it:
**native** is Quire's own layers, **transformers** the modules of the installed transformers over paged memory. All
others are refused before their weights are read, for one of these reasons:

- `state`: layers keep a state of their own;
- `attention`: attention does not call transformers' interface;
- `mask`: masks are not those of causal attention, windows or chunks;
- `shape`: paged attention cannot take the rows;
- `encoder`: it is no decoder that runs alone;
- `error`: transformers, or the check of the configuration, refuses it.

[Checkpoints](checkpoints.md) has the formats, and which families read which options.

{counts}

| model type | class | served by |
|---|---|---|
"""


class ModelRow(NamedTuple):
    """A model type, its class, and what serves it: "native", "transformers", or the word for why it is refused."""

    model_type: str
    architecture: str
    served_by: str


def row_of(model_type: str) -> ModelRow:
    """Return the row of a model type."""
    architecture = MODEL_TYPES[model_type]
    if architecture in FAMILIES:
        return ModelRow(model_type, architecture, "native")
    return ModelRow(model_type, architecture, hindrance_of(model_type) or "transformers")


def hindrance_of(model_type: str) -> str | None:
    """Return why transformers' modules of a model type cannot be served, None if they can."""
    try:
        config = json.loads(small_config(model_type).to_json_string())
    except Exception:
        return "error"
    try:
        examine(config | {"architectures": [MODEL_TYPES[model_type]]})
    except QuireError as error:
        found = re.search(r"paged memory \((\w+)\)", str(error))
        return found[1] if found else "error"
    return None


def page() -> str:
    """Return the text of the page."""
    rows = [row_of(model_type) for model_type in MODEL_TYPES]
    served: dict[str, int] = {}
    for row in rows:
        served[row.served_by] = served.get(row.served_by, 0) + 1
    counts = ", ".join(f"{name} {number}" for name, number in sorted(served.items(), key=lambda each: -each[1]))
    head = HEAD.format(version=transformers.__version__, counts=f"Of {len(rows)} entries: {counts}.")
    return head + "".join(f"| `{row.model_type}` | `{row.architecture}` | {row.served_by} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
