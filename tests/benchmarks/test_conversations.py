"""Conversations in turn under memory pressure: the marks, which do not depend on the machine, and the chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.conversations import MODELS, run
from benchmarks.conversations_chart import draw


@pytest.mark.parametrize("with_host", [False, True])
@pytest.mark.parametrize(("model", "least"), [("Gemma 3 1B", 0.65), ("Granite 4 hybrid 350M", 0.80)])
def test_conversations_are_hit_as_soon_as_what_is_live_fits(model: str, least: float, with_host: bool) -> None:
    assert run(MODELS[model], 1.0, with_host=with_host).hit_share >= least
    assert run(MODELS[model], 1.5, with_host=with_host).hit_share >= 0.98


@pytest.mark.parametrize("factor", [0.7, 0.8])
def test_two_equal_groups_in_a_pool_that_is_too_small_hit_as_one_does(factor: float) -> None:
    one, two = (run(MODELS[name], factor).hit_share for name in ("one group", "two equal groups"))
    assert two == pytest.approx(one, abs=0.01)


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [{"hit_share": 0.5}, {"hit_share": 0.9}]
    rows = [{"model": "one", "with_host": with_host, "runs": runs} for with_host in (False, True)]
    figures = {"factors": [1.0, 2.0], "rows": rows, "facts": {"commit": "0123456789"}}
    for idx, earlier in enumerate((None, figures)):
        image = tmp_path / f"{idx}.svg"
        draw(figures, earlier, image)
        assert "one, host tier" in image.read_text(encoding="utf-8")
