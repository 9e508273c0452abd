"""The collector's passes while requests are served."""

from __future__ import annotations

import gc
import weakref

from quire.platform.heap import frozen_heap


class Ring:
    """An object that only a pass of the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_passes_leave_out_what_was_there_and_find_it_afterwards() -> None:
    gc.unfreeze()  # the tests' own modules are frozen
    try:
        old = Ring()
        seen = weakref.ref(old)
        with frozen_heap(is_wanted=True):
            del old
            new = weakref.ref(Ring())
            gc.collect()
            assert seen() is not None
            assert new() is None
        gc.collect()
        assert seen() is None
    finally:
        gc.freeze()


def test_what_the_process_has_frozen_stays_so() -> None:
    gc.freeze()
    with frozen_heap(is_wanted=True):
        pass
    assert gc.get_freeze_count() > 0


def test_nothing_is_frozen_where_it_is_not_wanted() -> None:
    seen = weakref.ref(Ring())
    with frozen_heap(is_wanted=False):
        gc.collect()
        assert seen() is None
