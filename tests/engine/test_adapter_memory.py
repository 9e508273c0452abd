"""The memory of adapters on a GPU: what makes room, and what is refused. On a CPU, the tests set the limit.

Stock operators keep an adapter's matrices as they are.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, LoRARequest
from quire.errors import InvalidAdapter, OutOfAdapterMemory
from quire.models.adapters.memory import AdapterMemory
from quire.models.adapters.slots import AdapterSlots
from tests.engine.test_adapters import WIDTHS, World, run
from tests.models.adapters.folders import random_matrices, write_adapter


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapter_memory"))


def memory_of(llm: LLM | AsyncLLM) -> AdapterMemory:
    adapters = (llm.engine if isinstance(llm, LLM) else llm._engine).adapters
    assert adapters is not None
    slots = adapters.slots
    assert isinstance(slots, AdapterSlots)
    return slots.memory


def test_adapters_of_requests_give_way_where_a_gpu_has_no_memory_left(world: World) -> None:
    with world.load("one", kernels="torch") as llm:
        memory, registry = memory_of(llm), llm.engine.adapters
        assert registry is not None
        size = memory.taken
        assert size > 0, "read before the memory of a GPU is divided"
        memory.allow(size + size // 2)  # for two in all
        expected = run(llm, LoRARequest("one"))
        run(llm, world.request("two"))
        assert memory.taken == 2 * size
        run(llm, world.request("three"))
        assert [each.name for each in registry.loaded] == ["one", "three"]
        assert memory.taken == 2 * size
        registry.unload("three")
        registry.load(LoRARequest("kept", 1, world.paths["three"]), registry.read(world.paths["three"]))
        for _ in range(2):
            with pytest.raises(OutOfAdapterMemory, match="are taken, and this one needs") as no:
                run(llm, world.request("two"))
            assert no.value.field == "lora_path"
        del no
        assert memory.taken == 2 * size, "what did not fit takes nothing"
        registry.unload("kept")
        run(llm, world.request("two"))
        assert [each.name for each in registry.loaded] == ["one", "two"], "the idle one of a request gave way again"
        assert run(llm, LoRARequest("one"))[0] == expected[0]
        for name in ("one", "two"):
            registry.unload(name)
        assert memory.taken == 0


def test_an_adapter_that_can_never_fit_drives_none_out(world: World) -> None:
    with world.load(kernels="torch") as llm:
        memory, registry = memory_of(llm), llm.engine.adapters
        assert registry is not None
        run(llm, world.request("two"))
        memory.allow(0)
        large = str(write_adapter(Path(world.paths["one"]).parent / "large", random_matrices(WIDTHS, 16, 5)))
        with pytest.raises(InvalidAdapter, match="beside the KV cache and the largest step, and this one needs"):
            run(llm, LoRARequest("large", 1, large))
        assert [each.name for each in registry.loaded] == ["two"]


class KeepingExecutor(ThreadPoolExecutor):
    """An executor that keeps the results of all calls, as a thread without a core does for a while."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Future[Any]] = []

    def submit(self, *call: Any, **options: Any) -> Future[Any]:
        """Start a call."""
        self._kept.append(super().submit(*call, **options))
        return self._kept[-1]


def test_adapters_of_streams_give_way_too(world: World) -> None:
    async def load() -> None:
        asyncio.get_running_loop().set_default_executor(KeepingExecutor())
        async with AsyncLLM.from_options(**world.options(kernels="torch")) as llm:
            await llm.adapters.load(world.request("one"), is_kept=False)
            memory_of(llm).allow(0)
            await llm.adapters.load(world.request("two"))
            assert [each.name for each in llm.adapters.loaded] == ["two"]
            with pytest.raises(OutOfAdapterMemory):
                await llm.adapters.load(world.request("three"))
            assert [each.name for each in llm.adapters.loaded] == ["two"]

    asyncio.run(load())
