"""Token ids on the device that the host does not know yet: it launches kernels that read them, and does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.execution.step.pinned import HostCopy, placed
from quire.ops.interface.static_steps import vector
from quire.scheduling.decode_columns import row_starts_of
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN


class DeviceTokens(NamedTuple):
    """Token ids of some rows of a batch.

    Args:
        token_ids: int64 [n] on the device.
        rows: their rows, int64 [n] on the device; None for the first n.
    """

    token_ids: Tensor
    rows: Tensor | None = None

    def put(self, input_ids: Tensor) -> None:
        """Write the tokens to the token ids of the batch, int64 [T] on the device."""
        if self.rows is None:
            input_ids[: len(self.token_ids)].copy_(self.token_ids)
        else:
            input_ids.index_copy_(0, self.rows, self.token_ids)


class DeviceDrafts:
    """The drafts of a step: the target reads them on the device, and the host reads them while the target runs.

    Args:
        passes: one for each pass of the draft model, at least one: indices of the items that it made a draft for, and
            these drafts, int64 [n] on the device; nothing may write to them afterwards.
    """

    __slots__ = ("_copy", "_passes", "_token_ids")

    def __init__(self, passes: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        self._passes = [indices for indices, _ in passes]
        self._token_ids = torch.cat([token_ids for _, token_ids in passes])
        self._copy = HostCopy(self._token_ids)

    def of_rows(self, items: Sequence[ScheduledSequence]) -> DeviceTokens:
        """Return the drafts as tokens of the items' batch."""
        starts = row_starts_of(items)
        rows = [
            starts[idx + 1] - items[idx].num_draft + depth
            for depth, indices in enumerate(self._passes)
            for idx in indices
        ]
        return DeviceTokens(self._token_ids, placed(vector(rows), self._token_ids.device))

    def read(self, items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the items with drafts in place of their placeholders; the host waits for the draft passes only."""
        drafts: dict[int, list[int]] = {}
        token_ids = iter(self._copy.tolist())
        for indices in self._passes:
            for idx in indices:
                drafts.setdefault(idx, []).append(next(token_ids))
        known = list(items)
        for idx, drafted in drafts.items():
            item = items[idx]
            known[idx] = item._replace(token_ids=(*item.token_ids[: -item.num_draft], *drafted))
        return known


def num_wanted(items: Sequence[ScheduledSequence]) -> list[int]:
    """Return the number of drafts that the data plane must make for each item."""
    return [item.num_draft if item.num_draft and item.token_ids[-1] == UNKNOWN else 0 for item in items]


class DraftTokens:
    """The drafts of the present step, which the host has not read: the tokens of its placeholders."""

    def __init__(self) -> None:
        self.known: DeviceTokens | None = None

    def take_drafts(
        self, items: Sequence[ScheduledSequence], passes: Sequence[tuple[Sequence[int], Tensor]]
    ) -> DeviceDrafts | None:
        """Return the drafts of a step, and keep them as `known` for its items; None without passes."""
        drafts = DeviceDrafts(passes) if passes else None
        self.known = None if drafts is None else drafts.of_rows(items)
        return drafts

    def fill(self, input_ids: Tensor, items: Sequence[ScheduledSequence], rows: Sequence[int]) -> None:  # noqa: ARG002
        """See `TokenSource`."""
        if self.known is not None:
            self.known.put(input_ids)
