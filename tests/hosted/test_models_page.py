"""The page of models says what the installed transformers has and what Quire does with it."""

from __future__ import annotations

import pytest
import transformers

from tools import models_page

pytestmark = pytest.mark.slow


def test_the_page_is_current() -> None:
    written = models_page.PAGE.read_text()
    version = written.splitlines()[0].rpartition(" ")[2]
    if transformers.__version__ != version:
        pytest.skip(f"the page is of transformers {version}, and {transformers.__version__} is installed")
    assert models_page.page() == written, "run: python -m tools.models_page"
    counts = [written.count(f"| {name} |\n") for name in ("native", "transformers")]
    assert sum(counts) >= 110
    assert written.count("| error |\n") <= 15
