"""A sampling parameter that does not declare that a device can draw with it is honoured everywhere, by the host."""

from __future__ import annotations

from contextlib import closing
from dataclasses import field, make_dataclass
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.inputs import request_builder
from quire.execution.sampling import row_sampling, sampling
from quire.execution.sampling.sampling import Filter
from tests.ops.backends import LIBRARIES

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no native kernels were built")
STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to"


class MoreFilter(Filter):
    """The filters of a row, and one more: tokens below `least_square` times the greatest probability squared go."""

    least_square: float

    @classmethod
    def of(cls, params: SamplingParams) -> MoreFilter:
        filters = cls(*Filter.of(params))
        filters.least_square = params.least_square  # type: ignore[attr-defined]
        return filters


def add_filter(monkeypatch: pytest.MonkeyPatch, **metadata: bool) -> type[SamplingParams]:
    """Add a parameter where a new filter is to be added: to the parameters, to `Filter` and to `_truncate`.

    Args:
        metadata: of its field.

    Returns:
        The class of the parameters with it.
    """
    truncate = sampling._truncate

    def truncate_more(logits: torch.Tensor, filters: Any) -> None:
        truncate(logits, filters)
        least_square = torch.tensor([own.least_square for own in filters])[:, None]
        logits.masked_fill_(logits < least_square.log() - logits.logsumexp(-1, keepdim=True), -torch.inf)

    added = [("least_square", float, field(default=0.0, metadata=metadata))]
    cls = make_dataclass("MoreParams", added, bases=(SamplingParams,), kw_only=True, slots=True, unsafe_hash=True)
    monkeypatch.setattr(row_sampling, "Filter", MoreFilter)
    monkeypatch.setattr(sampling, "_truncate", truncate_more)
    monkeypatch.setattr(request_builder, "SamplingParams", cls)
    return cls


def outputs(cls: type[SamplingParams], least_square: float, **options: Any) -> list[list[int]]:
    """Return the tokens of three requests with `least_square`, beside one without."""
    given: list[dict[str, Any]] = [{"least_square": least_square}] * 3 + [{}]
    params = [cls(temperature=1.5, max_tokens=24, seed=seed, **own) for seed, own in enumerate(given)]
    with closing(LLM("bundled", num_threads=1, max_model_len=64, deterministic=True, **options)) as llm:
        found = llm.generate([STORY] * len(params), params, use_tqdm=False)
    assert [output.error for output in found] == [None] * len(found)
    return [list(output.outputs[0].token_ids) for output in found]


def test_a_filter_that_is_declared_nowhere_is_slower_and_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        undeclared = add_filter(patch)
        assert (undeclared(least_square=0.9).needs_host, undeclared().needs_host) == (True, False)  # type: ignore[call-arg]
        step_by_step = outputs(undeclared, 0.9)
        assert outputs(undeclared, 0.9, async_scheduling=True) == step_by_step
        without = outputs(undeclared, 0.0)
    # The same filter, declared as one that a device has, is ignored: so the comparison above can fail.
    claimed = outputs(add_filter(monkeypatch, on_device=True), 0.9, async_scheduling=True)
    assert claimed == without
    assert [one == other for one, other in zip(claimed, step_by_step, strict=True)] == [False] * 3 + [True]
