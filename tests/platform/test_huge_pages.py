"""Huge pages: memory of the engine's own, and torch's switch, which is read at the first tensor of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quire.platform.huge_pages import HUGE_PAGE_BYTES, empty_bytes

# In a process of its own: imports all of Quire, and prints each operator of torch that runs meanwhile.
IMPORT_ALL = """
import importlib, pkgutil
from torch.utils._python_dispatch import TorchDispatchMode
import quire

class Printed(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(module.name, func)
        return func(*args, **kwargs or {})

for module in pkgutil.walk_packages(quire.__path__, "quire."):
    if not module.name.endswith("__main__"):
        with Printed():
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in ("ray", "triton"):  # extras that the tests do without
                    raise
"""


def test_memory_starts_at_a_huge_page_and_has_the_asked_size() -> None:
    for num_bytes in (0, 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5):
        memory = empty_bytes(num_bytes)
        assert memory.dtype == torch.uint8
        assert memory.shape == (num_bytes,)
        assert memory.untyped_storage().nbytes() == num_bytes
        assert num_bytes == 0 or memory.data_ptr() % HUGE_PAGE_BYTES == 0
        memory.fill_(7)
        assert (memory == 7).all()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    part = empty_bytes(HUGE_PAGE_BYTES)[5:9]
    part.fill_(3)
    empty_bytes(HUGE_PAGE_BYTES).fill_(1)
    assert part.tolist() == [3, 3, 3, 3]


def test_systems_without_such_pages_have_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.platform.huge_pages.sys.platform", "darwin")
    assert empty_bytes(100).shape == (100,)


def test_importing_quire_makes_no_tensor() -> None:
    """Torch reads its switch for huge pages at the first tensor: one at import made every step 3 to 7 % slower."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == ""
