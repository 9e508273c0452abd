"""Grammars that requests have in common stay while they are held, and the latest ones longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.sequences.structured import OR_ELSE, GrammarSource
from quire.text.structured.grammar_backend import GrammarBackend
from quire.text.structured.grammar_compiler import CACHED_BYTES, NUM_CACHED, GrammarCache
from quire.text.structured.grammar_process import GrammarProcess
from quire.text.structured.grammar_setup import GrammarModel
from quire.text.structured.local_grammars import HeldGrammar, LocalGrammars
from tests.structured.grammar_world import NUM_IDS, json_call


@pytest.fixture(scope="module", params=[LocalGrammars, GrammarProcess])
def grammars(request: pytest.FixtureRequest) -> Iterator[GrammarBackend]:
    grammars: GrammarBackend = request.param(GrammarModel(json_call, NUM_IDS, (0,)))
    yield grammars
    grammars.close()


def sources_of(letter: str) -> Iterator[GrammarSource]:
    return (GrammarSource("regex", f"{letter}{{{number}}}") for number in count(1))


def test_grammars_that_nobody_holds_make_room_for_others(grammars: GrammarBackend) -> None:
    cache = GrammarCache()
    sources = [source for source, _ in zip(sources_of("a"), range(NUM_CACHED + 2), strict=False)]
    held = cache.add(sources[0], grammars.hold(sources[0], 0))
    for source in sources[1:]:
        cache.add(source, grammars.hold(source, 0))
    assert cache.find(sources[0]) is held, "a holder keeps it in the cache"
    assert cache.find(sources[1]) is None
    last = cache.find(sources[-1])
    assert last is not None
    assert cache.add(sources[-1], grammars.hold(sources[-1], 0)) is last


def test_parts_that_are_not_enforced_are_logged_here(
    grammars: GrammarBackend, caplog: pytest.LogCaptureFixture
) -> None:
    rule = f"start: /(?=x)/{OR_ELSE}start: /x+/"
    assert grammars.hold(GrammarSource("grammar", f"%llguidance {{}}\n{rule}\n"), 0).is_held
    assert len(caplog.messages) == 1
    assert "is not enforced" in caplog.messages[0]


def test_kept_grammars_are_bounded_by_what_compiling_took(grammars: GrammarBackend) -> None:
    cache, large = GrammarCache(), GrammarSource("regex", "c")
    sources = [source for source, _ in zip(sources_of("b"), range(4), strict=False)]

    def add(source: GrammarSource, num_bytes: int) -> HeldGrammar:
        return cache.add(source, grammars.hold(source, num_bytes))

    for source in sources[:3]:
        add(source, CACHED_BYTES // 3)
    assert all(cache.find(source) for source in sources[:3])
    add(sources[3], CACHED_BYTES // 2)
    assert [cache.find(source) is not None for source in sources] == [False, False, True, True]
    held = add(large, CACHED_BYTES + 1)
    assert cache.find(large) is held
    assert not any(cache.find(source) for source in sources), "there is no room beside it"
    del held
    gc.collect()
    assert cache.find(large) is None, "it is kept as long as it is held"
