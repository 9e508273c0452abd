"""One command that measures the Triton backend on an NVIDIA GPU: `python -m benchmarks.gpu`.

A copy of the tree is enough: where Quire is not installed, the copy's own package is imported.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("quire") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
