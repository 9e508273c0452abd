"""The target's own head for multi-token prediction (MTP), which proposes the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.execution.capture.graph_ladder import GraphLadder
from quire.execution.device_tokens.device_tokens import (
    DeviceDrafts,
    DeviceTokens,
    DraftTokens,
    num_wanted,
)
from quire.execution.step.batch import BatchBuilder
from quire.execution.step.kv_storage import StateStorage, Storage
from quire.execution.step.pinned import placed
from quire.models.modules.mtp import MTPHead
from quire.ops.interface.ops import StateBatch
from quire.ops.interface.static_steps import vector
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN


class MTPDrafter:
    """Runs an MTP head in its own cache groups: keys and values, and a state with the last hidden state.

    The state is handled like a recurrent layer's: snapshots of it are published with blocks, and rejected drafts roll
    it back. So the hidden state before a step's first token always exists, also after a prefix cache hit.

    ```
     guess    before the target    last token, state              -> draft 1, hidden state of the head
                                   draft 1, that hidden state     -> draft 2 ...
     follow   after the target     all tokens, target's hidden    -> keys and values, of drafts too; state
    ```

    `follow` overwrites the keys and values that `guess` stored: the contents of blocks do not depend on drafts.
    """

    def __init__(
        self,
        head: MTPHead,
        builder: BatchBuilder,
        tokens: DraftTokens,
        storages: Sequence[Storage],
        groups: range,
        ladder: GraphLadder | None = None,
    ) -> None:
        *self._storages, states = storages
        assert isinstance(states, StateStorage)
        # [B, E]: for each block, the last hidden state of the sequence that owns it.
        self._states = states.conv_states[0][:, 0]
        self._head = head
        self._builder, self._tokens = builder, tokens
        self._groups = groups
        self._ladder = ladder

    def guess(self, items: Sequence[ScheduledSequence]) -> DeviceDrafts | None:
        """Return drafts for the placeholders among the tokens of items; None if there are none."""
        wanted = num_wanted(items)
        live = [idx for idx, count in enumerate(wanted) if count]
        passes: list[tuple[Sequence[int], Tensor]] = []
        hidden: Tensor | None = None
        self._tokens.known = None
        while live:
            depth, step = len(passes), []
            for idx in live:
                item, last = items[idx], len(items[idx].token_ids) - wanted[idx] - 1
                token_ids = (UNKNOWN,) if depth else (item.token_ids[last],)
                step.append(item._replace(start=item.start + last + depth, token_ids=token_ids))
            hidden, drafted = self._run(step, self._last_hidden(step) if hidden is None else hidden)
            passes.append((live, drafted))
            kept = [row for row, idx in enumerate(live) if depth + 1 < wanted[idx]]
            if 0 < len(kept) < len(live):
                rows = self._placed(kept)
                hidden, drafted = hidden.index_select(0, rows), drafted.index_select(0, rows)
            self._tokens.known = DeviceTokens(drafted)
            live = [live[row] for row in kept]
        return self._tokens.take_drafts(items, passes)

    def _run(self, items: Sequence[ScheduledSequence], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run a pass of `guess`, by replaying a captured pass if possible.

        Args:
            items: n items of one token each.
            hidden: [n, E], normed hidden state of the token before each.

        Returns:
            Normed hidden states of the head [n, E], which the next pass may overwrite, and the likeliest tokens [n].
        """
        ladder = self._ladder
        if ladder is not None and ladder.takes(items):
            return ladder.run_pass(items, self._builder, hidden)
        batch = self._builder.lay_out(items, self._groups[:-1])
        hidden = self._head.run(batch.input_ids, batch.positions, batch.groups, self._storages, hidden)
        return hidden, self._head.predict(hidden)

    def follow(
        self, items: Sequence[ScheduledSequence], hidden: Tensor, given: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Store the keys and values of a step's tokens, and the last hidden state of each sequence."""
        batch = self._builder.lay_out(items, self._groups)
        none = self._builder.lay_out_ends(items, [0] * len(items), self._groups)
        *groups, states = batch.groups
        assert isinstance(states, StateBatch)
        normed = self._head.normed(hidden)
        before = normed.roll(1, 0)
        before[self._placed(states.row_starts[:-1])] = self._last_hidden(items)
        self._head.run(batch.input_ids, batch.positions, groups, self._storages, before, given, none)
        last_rows = self._placed(end - 1 for end in states.row_starts[1:])
        self._states[self._placed(states.block_ids)] = normed.index_select(0, last_rows)

    def _last_hidden(self, items: Sequence[ScheduledSequence]) -> Tensor:
        """Return the hidden state before the first token of each item [S, E]; zeros at position 0."""
        tables = [self._builder.tables[item.seq_id][self._groups[-1]] for item in items]
        hidden = self._states.index_select(0, self._placed(table.ids[-1] for table in tables))
        starts = [item.start for item in items]
        return hidden if all(starts) else torch.where(self._placed(starts)[:, None] > 0, hidden, 0.0)

    def _placed(self, numbers: Iterable[int]) -> Tensor:
        """Return numbers of the host as int64 on the device; the host does not wait."""
        return placed(vector(numbers), self._states.device)
