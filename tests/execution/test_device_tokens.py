"""Drafts that a model makes are read by the target on the device, and by the host once the target is launched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputs
from quire.execution.device_tokens.device_tokens import DeviceDrafts, DeviceTokens, DraftTokens
from quire.execution.step.batch import BatchBuilder, BlockTable
from quire.models.specs.spec import TokenCacheShape
from quire.scheduling.plan import ScheduledSequence, TableDelta
from quire.sequences.decoding.drafting import UNKNOWN

PROMPTS = ["The keeper of the lighthouse", "Once upon a time there was", "A small boat"]


def item_of(seq_id: int, token_ids: tuple[int, ...], num_draft: int) -> ScheduledSequence:
    return ScheduledSequence(seq_id, 10, token_ids, (), 1, None, num_draft)


# Drafts of uneven numbers, behind one or several tokens, and items without any.
ITEMS = [
    item_of(0, (7,), 0),
    item_of(1, (8, UNKNOWN), 1),
    item_of(2, (9, 10, UNKNOWN, UNKNOWN, UNKNOWN), 3),
    item_of(3, (11, 12), 1),  # of another drafter: the host knows it
    item_of(4, (13, UNKNOWN, UNKNOWN), 2),
]
PASSES = [
    ([1, 2, 4], torch.tensor([100, 200, 400])),
    ([2, 4], torch.tensor([201, 401])),
    ([2], torch.tensor([202])),
]
WITH_PLACEHOLDERS = [token_id for item in ITEMS for token_id in item.token_ids]
WITH_DRAFTS = [7, 8, 100, 9, 10, 200, 201, 202, 11, 12, 13, 400, 401]


def test_drafts_replace_their_placeholders_on_the_device_and_on_the_host() -> None:
    drafts = DeviceDrafts(PASSES)
    input_ids = torch.tensor(WITH_PLACEHOLDERS)
    drafts.of_rows(ITEMS).put(input_ids)
    assert input_ids.tolist() == WITH_DRAFTS
    known = drafts.read(ITEMS)
    assert [token_id for item in known for token_id in item.token_ids] == WITH_DRAFTS
    for item, before in zip(known, ITEMS, strict=True):
        assert item._replace(token_ids=()) == before._replace(token_ids=())
    assert drafts.read(known) == known, "a second read finds what the first one did"


def test_tokens_that_are_on_the_device_are_those_of_the_items_and_not_of_their_ends() -> None:
    tokens = DraftTokens()
    builder = BatchBuilder(4, "cpu", [TokenCacheShape(1, 8)], tokens)
    for item in ITEMS:
        table = BlockTable()
        table.change(TableDelta(0, 0, tuple(range(4 * item.seq_id, 4 * item.seq_id + 4))))
        builder.tables[item.seq_id] = (table,)
    tokens.known = DeviceDrafts(PASSES).of_rows(ITEMS)
    assert builder.lay_out(ITEMS).input_ids.tolist() == WITH_DRAFTS
    ends = builder.lay_out_ends(ITEMS, [1, 1, 2, 1, 0])
    assert ends is not None
    assert ends.rows.tolist() == [0, 2, 6, 7, 9]
    tokens.known = DeviceTokens(torch.tensor([1, 2, 3]))
    assert builder.lay_out(ITEMS).input_ids.tolist() == [1, 2, 3, *WITH_PLACEHOLDERS[3:]]
    tokens.known = None
    assert builder.lay_out(ITEMS).input_ids.tolist() == WITH_PLACEHOLDERS


def test_no_batch_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned waits for all that was launched before: the passes, and the target."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    waits = list[bool]()

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "_to_copy":
                waits.append(not kwargs.get("non_blocking"))
            return func(*args, **(kwargs or {}))

    builder = BatchBuilder(4, "meta", [TokenCacheShape(1, 8)])
    for item in ITEMS:
        builder.tables[item.seq_id] = (BlockTable(),)
        builder.tables[item.seq_id][0].change(TableDelta(0, 0, tuple(range(4))))
    with Copies():  # type: ignore[no-untyped-call]
        builder.lay_out(ITEMS)
        builder.lay_out_ends(ITEMS, [1, 1, 2, 1, 0])
    assert waits
    assert not any(waits)


def recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which an engine with a draft model adds what it does in its steps."""
    events = list[str]()

    def record(owner: Any, name: str, event: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            events.append(event)
            return method(*args)

        monkeypatch.setattr(owner, name, call)

    runner: Any = llm.engine.executor._runner  # type: ignore[attr-defined]
    record(runner.draft, "_run", "pass")
    record(runner, "_compute", "target")
    record(runner._sampler, "begin_step", "begin")
    record(DeviceDrafts, "read", "read")
    return events


@pytest.mark.parametrize("is_constrained", [False, True])
def test_the_host_reads_drafts_once_the_target_is_launched(
    is_constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no pass before that, but for all of them where grammars mask rows of drafts."""
    forms = StructuredOutputs(regex="[a-z ]{40,60}") if is_constrained else None
    params = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=forms)
    options = {"num_kv_blocks": 256, "num_threads": 1}
    with LLM(model="bundled", **options) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params, use_tqdm=False)]
    with LLM(
        model="bundled", speculative_method="draft", draft_model="bundled", num_speculative_tokens=3, **options
    ) as llm:
        events = recorded(llm, monkeypatch)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats.num_accepted_tokens > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected
    steps = "".join(f" {event}" for event in events).split(" target")
    with_drafts = [(before, after) for before, after in pairwise(steps) if before.count("pass") > 1]
    assert with_drafts
    for before, after in with_drafts:
        assert before.removeprefix(" read").count("read") == is_constrained
        assert before.endswith(" pass read begin" if is_constrained else " pass begin")
        assert after.startswith(" read")
