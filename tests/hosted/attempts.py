"""Serves small checkpoints of the model types that lines of standard input name, each in a fork (`tests.forked`).

A line is JSON with a model type, a folder to write to, and options of the engine; so is what an attempt says:

- `outcome`: "unbuildable" (by transformers), "refused" (by Quire, typed) or "served";
- `why`: the error of the first two;
- `hindrance`: of a refusal, the word for its reason, None if it has none;
- `facts`: of a refusal, what transformers' own model does (`tests.hosted.facts`);
- `histories`: of what is served, "equal" or what differs, by history;
- `is_exact`: of what is served, whether transformers itself gives the same tokens without its cache.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.forked import serve

MEMORY_BYTES = 4 << 30
TIMEOUT_S = 240


def attempt(line: str) -> str:
    """Make a checkpoint, load it, and run the histories."""
    asked = json.loads(line)
    folder = Path(asked["folder"])
    try:
        return json.dumps(outcome_of(asked["model_type"], folder, asked["options"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outcome_of(model_type: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a model type."""
    from quire.errors import QuireError
    from tests.hosted.checkpoints import NoReference, build
    from tests.hosted.facts import observe
    from tests.hosted.histories import ENGINES, load, run_histories

    try:
        model, reference = build(model_type)
        model.save_pretrained(folder)
    except NoReference as error:
        return {"outcome": "unbuildable", "why": str(error)}
    try:
        load(folder, options).close()
    except QuireError as error:
        facts = observe(model)._asdict()
        named = re.search(r"paged memory \((\w+)\)", str(error))
        return {"outcome": "refused", "why": str(error), "hindrance": named and named[1], "facts": facts}
    histories = run_histories(folder, reference, tuple(ENGINES), **options)
    return {"outcome": "served", "histories": histories, "is_exact": reference.is_exact}


def main() -> None:
    """Serve attempts until there are no more."""
    import tests.hosted.facts
    import tests.hosted.histories  # noqa: F401

    serve(attempt, MEMORY_BYTES, TIMEOUT_S)


if __name__ == "__main__":
    main()
