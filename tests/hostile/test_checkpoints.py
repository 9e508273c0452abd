"""Whatever a checkpoint holds: loading and using it works, or fails with a typed error, in bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Attempt, attempts_of
from tests.hostile.checkpoints import Maker
from tests.server import checkpoint

MOST_BYTES = 3 << 30
# Damage of each kind of file; the others are slow.
DEFAULT_KINDS = ("config", "tokenizer", "template", "header", "weights")
KINDS = ("config", "configs", "family", "file", "tokenizer", "anywhere_in_json", "template", "header", "weights")


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    folder = checkpoint.save(tmp_path_factory.mktemp("good") / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [1], "top_k": 5}))
    return Maker(folder)


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with attempts_of("tests.hostile.attempts") as attempt:
        yield attempt


def check(maker: Maker, attempt: Attempt, folder: Path, kind: str, seed: int) -> str:
    outcome = attempt(str(maker.make(folder, kind, seed)))
    assert outcome["said"].startswith(("loaded; ", "refused: ")), f"{kind} {seed}: {outcome['said']}"
    assert outcome["bytes"] < MOST_BYTES, f"{kind} {seed}"
    return str(outcome["said"])


def test_a_good_checkpoint_does_what_it_should(maker: Maker, attempt: Attempt, tmp_path: Path) -> None:
    maker.kinds["none"] = lambda *_: None
    generated = "generated; PromptTooLong; PromptTooLong; generated"
    assert check(maker, attempt, tmp_path / "model", "none", 0) == f"loaded; {generated}; chatted"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in DEFAULT_KINDS else pytest.mark.slow) for kind in KINDS]
)
def test_a_hostile_checkpoint_is_refused_or_harmless(maker: Maker, attempt: Attempt, tmp_path: Path, kind: str) -> None:
    for seed in range(8):
        check(maker, attempt, tmp_path / "model", kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_hostile_checkpoint_does_harm(maker: Maker, attempt: Attempt, tmp_path: Path, kind: str) -> None:
    said = [check(maker, attempt, tmp_path / "model", kind, seed) for seed in range(1000, 1150)]
    assert len(set(said)) > 4
