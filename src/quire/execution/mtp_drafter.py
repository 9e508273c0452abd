"""The target's own head for multi-token prediction, which guesses how sequences go on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from quire.decoding.drafting import UNKNOWN
from quire.execution.batch import BatchBuilder
from quire.execution.kv_storage import StateStorage, Storage
from quire.models.mtp import MTPHead
from quire.ops.interface import AttentionBatch, StateBatch
from quire.scheduling.plan import ScheduledSequence


class MTPDrafter:
    """Runs an MTP head in cache groups of its own: keys and values, and a state with the last hidden state.

    The state is what recurrent layers have: snapshots of it are published with the blocks, and it goes back with them
    after rejected drafts. So the hidden state before a step's first token is always there, also behind a prefix hit.

    ```
     guess    before the target    last token, state              -> draft 1, hidden state of the head
                                   draft 1, that hidden state     -> draft 2 ...
     follow   after the target     all tokens, target's hidden    -> keys and values, of drafts too; state
    ```

    What a guess stores, `follow` overwrites: what lies in blocks depends on no drafts.

    Args:
        head: head of the model that the steps run.
        builder: follows the plans, for the groups of both.
        storages: memory of the head's groups.
        groups: its groups among all.
    """

    def __init__(self, head: MTPHead, builder: BatchBuilder, storages: Sequence[Storage], groups: range) -> None:
        *self._storages, states = storages
        assert isinstance(states, StateStorage)
        # [B, E]: the last hidden state of the sequence that owns a block.
        self._states = states.conv_states[0][:, 0]
        self._head = head
        self._builder = builder
        self._groups = groups

    def guess(self, items: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the items with drafts in the place of those that are left to the data plane."""
        wanted = [item.num_draft if UNKNOWN in item.token_ids else 0 for item in items]
        live = [idx for idx, count in enumerate(wanted) if count]
        drafted = list(items)
        tokens = {idx: [*items[idx].token_ids[: -wanted[idx]]] for idx in live}
        hidden: Tensor | None = None
        while live:
            step = [
                items[idx]._replace(start=items[idx].start + len(tokens[idx]) - 1, token_ids=tokens[idx][-1:])
                for idx in live
            ]
            batch = self._builder.lay_out(step, self._groups)
            *groups, states = batch.groups
            if hidden is None:
                hidden = self._last_hidden(states)
            hidden = self._head.run(batch.input_ids, batch.positions, groups, self._storages, hidden)
            for idx, token_id in zip(live, self._head.predict(hidden), strict=True):
                tokens[idx].append(token_id)
                drafted[idx] = items[idx]._replace(token_ids=tuple(tokens[idx]))
            goes_on = [len(tokens[idx]) < len(items[idx].token_ids) for idx in live]
            hidden, live = hidden[goes_on], list(compress(live, goes_on))
        return drafted

    def follow(
        self, items: Sequence[ScheduledSequence], hidden: Tensor, given: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Store the keys and values of a step's tokens, and the last hidden state of each sequence.

        Args:
            items: items of the step, with all drafts.
            hidden: [T, E], hidden states of the target for all their tokens.
            given: see `Decoder`.
        """
        batch = self._builder.lay_out(items, self._groups)
        none = self._builder.lay_out_ends(items, [0] * len(items), self._groups)
        *groups, states = batch.groups
        assert isinstance(states, StateBatch)
        normed = self._head.normed(hidden)
        before = normed.roll(1, 0)
        before[list(states.row_starts[:-1])] = self._last_hidden(states)
        self._head.run(batch.input_ids, batch.positions, groups, self._storages, before, given, none)
        self._states[list(states.block_ids)] = normed[[end - 1 for end in states.row_starts[1:]]]

    def _last_hidden(self, states: AttentionBatch | StateBatch) -> Tensor:
        """Return the hidden state before the first token of each sequence [S, E]; zeros where none is before it."""
        assert isinstance(states, StateBatch)
        is_known = torch.tensor(states.has_state, device=self._states.device)
        return torch.where(is_known[:, None], self._states[list(states.block_ids)], 0.0)
