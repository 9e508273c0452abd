"""The torch line, seen from a fresh interpreter: what an import really brings in."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "starlette", "rich")
# In one interpreter, which starts once: what an import brings in shows after it, and after all that follow.
LIGHT = (
    "import quire",
    "import quire.errors",
    "from quire import SamplingParams",
    "import quire.sequences.params",
    "import quire.sequences.decoding",
    "import quire.memory",
    "import quire.memory.manager",
    "import quire.scheduling.plan",
    "import quire.scheduling.scheduler",
    "import quire.config",
    "import quire.models.capacity.planner",
    "import quire.measurement.simulation",
)


def heavy_modules_after(*statements: str) -> dict[str, list[str]]:
    """Return which heavy modules a new interpreter holds after each of its statements."""
    code = "import json, sys\nfound = {}\n"
    for statement in statements:
        code += f"{statement}\nfound[{statement!r}] = [name for name in {HEAVY!r} if name in sys.modules]\n"
    done = subprocess.run([sys.executable, "-c", f"{code}print(json.dumps(found))"], capture_output=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_control_plane_brings_in_the_standard_library_only() -> None:
    assert heavy_modules_after(*LIGHT) == {statement: [] for statement in LIGHT}


def test_a_public_name_is_loaded_when_it_is_asked_for() -> None:
    before, after = heavy_modules_after("import quire", "from quire import LLM").values()
    assert before == []
    assert "torch" in after
