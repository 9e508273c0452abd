"""Captured decode steps for a ladder of batch sizes: a step is padded to, and replays, the next larger size."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.execution.capture.captured_passes import CapturedPass, StepInputs
from quire.execution.capture.laid_tables import LaidTables
from quire.execution.capture.step_capture import CapturedCall, StepCapture
from quire.execution.step.batch import BatchBuilder, BlockTable
from quire.execution.step.kv_storage import StateStorage, Storage
from quire.execution.step.pinned import placed
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import TokenCacheShape
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.static_steps import (
    MakesStaticSteps,
    StaticAdapters,
    StaticLimits,
    StaticMemory,
    StaticStates,
    StaticTokens,
    vector,
)
from quire.scheduling.decode_columns import DecodeItems, seq_ids_of, starts_of
from quire.scheduling.plan import ScheduledSequence

logger = logging.getLogger(__name__)

# Block tables have room for this many times the blocks of a pool: a shared block is an entry in several tables.
TABLES_PER_POOL: Final = 4


class CapturedStep:
    """A captured decode step of one size, from token ids and block tables to logits; all tensors are static."""

    __slots__ = ("_call", "size")

    def __init__(self, size: int, call: CapturedCall) -> None:
        self.size, self._call = size, call

    def replay(self) -> None:
        """Replay the captured step on the inputs in static memory."""
        self._call.replay()


class ReplayedStep(NamedTuple):
    """Results of a replayed step of n rows: views of static memory, which the next step overwrites.

    Args:
        hidden: hidden states before the last norm, [n, E]; normed for an MTP head.
        outputs: logits, float32 [n, V], with ranks [n, 0]; for draft passes, the likeliest tokens, int64 [n, C].
        next_positions: position of the token that is sampled for each row, int64 [n] on the device.
    """

    hidden: Tensor
    outputs: Tensor
    next_positions: Tensor

    def select(self, rows: Sequence[int]) -> ReplayedStep:
        """Return some of the rows, as copies; the host does not wait."""
        idxs = placed(vector(rows), self.hidden.device)
        return ReplayedStep(*(numbers.index_select(0, idxs) for numbers in self))


class GraphLadder:
    """The captured steps of a model over its KV memory.

    ```
     rows   | a step's sequences, n of them | padding: token 0 at position 0, in the null block |   n <= size
    ```

    A sequence whose drafts are verified has a row for each token; these rows can share a prefix like rows of different
    sequences. A recurrent state is carried through the rows of its sequence.

    Steps that read shared prefixes once need additional launches, which would slow down other steps. So they are
    captured separately, for fewer sizes: padding costs little compared to the savings. Steps with adapters, with
    two more launches per linear layer, are separate too; in these each row reads its shared prefix by itself.

    Args:
        decoder: the model, whose backend makes static steps.
        storages: memory of its cache groups; for an MTP head, only of the first groups, which its layers read.
        sizes: numbers of rows to capture, ascending.
        limits: the largest step.
        block_size: N.
        capture: captures calls.
        computed: the computation of a step.
        first_group: index of the first of its cache groups in the block tables.

    Raises:
        RuntimeError: a step cannot be captured.
    """

    def __init__(
        self,
        decoder: Decoder,
        storages: Sequence[Storage],
        sizes: Sequence[int],
        limits: StaticLimits,
        block_size: int,
        capture: StepCapture,
        computed: CapturedPass,
        first_group: int = 0,
    ) -> None:
        self._block_size, self._computed, self._first_group = block_size, computed, first_group
        self._memory = memory = StaticMemory(decoder.device)
        num_rows = limits.num_rows
        self._ids, self._positions, self._next_positions = (memory.take(num_rows, torch.int64) for _ in range(3))
        self._groups = [
            _static_group(decoder, shape.cache, storage, memory, limits)
            for shape, storage in zip(decoder.cache_groups[: len(storages)], storages, strict=True)
        ]
        # By group index, sorted once: a runtime protocol check per step would cost more than the step's own loops.
        self._states = {idx: group for idx, group in enumerate(self._groups) if isinstance(group, StaticStates)}
        self._tokens = {idx: group for idx, group in enumerate(self._groups) if not isinstance(group, StaticStates)}
        self._tables = {idx: LaidTables(group.block_ids, block_size) for idx, group in self._tokens.items()}
        # `seq_ids` of the last run's `DecodeItems`, and the block tables of these sequences, by group.
        self._known: tuple[list[int], list[list[BlockTable]]] | None = None
        self._hidden = torch.zeros(num_rows, decoder.spec.width, dtype=decoder.dtype, device=decoder.device)
        self._outputs = computed.make_outputs(num_rows)
        self._limits = limits
        self._sizes = list(sizes)
        self._adapters: StaticAdapters | None = None
        # The largest graph is captured first: the others reuse its memory pool.
        self._sharing_steps = self._capture(sharing_sizes(sizes) if self._tokens else (), capture, shares=True)
        self._steps = self._capture(sizes, capture)
        self._adapted_steps: list[CapturedStep] = []
        if of_adapted := adapted_sizes(decoder, sizes):
            assert isinstance(decoder.ops, MakesStaticSteps), "the backend has no static steps"
            self._adapters = decoder.ops.static_adapters(memory, limits)
            self._adapted_steps = self._capture(of_adapted, capture)
        logger.info("Captured decode steps of %s rows", ", ".join(map(str, self._sizes)))

    def _capture(self, sizes: Sequence[int], capture: StepCapture, *, shares: bool = False) -> list[CapturedStep]:
        """Capture a step of each size with padding rows as its input."""
        steps = []
        for size in reversed(sizes):
            self._write(self._lay_out((), None), size, shares)
            if self._adapters is not None:
                self._adapters.write_adapters(None, size)
            self._memory.upload()
            steps.append(CapturedStep(size, capture.capture(partial(self._compute, size, shares))))
        return steps[::-1]

    def _compute(self, size: int, shares: bool) -> None:
        """Compute the step whose inputs are in static memory, as one of `size` rows."""
        batches = [
            group.batch(size) if isinstance(group, StaticStates) else group.batch(size, shares)
            for group in self._groups
        ]
        adapters = None if self._adapters is None else (self._adapters.rows(size), None)
        inputs = StepInputs(self._ids.device[:size], self._positions.device[:size], batches, adapters)
        self._computed.run(inputs, self._hidden[:size], self._outputs[:size])

    def takes(self, items: Sequence[ScheduledSequence]) -> bool:
        """Return whether items of one token each fit into a captured step; items of one sequence are in token order."""
        if not 0 < len(items) <= self._sizes[-1]:
            return False
        starts = starts_of(items)
        if (max(starts) // self._block_size + 1) * len(items) <= self._limits.num_blocks:
            return True
        last = dict(zip(seq_ids_of(items), starts, strict=True))
        return sum(start // self._block_size + 1 for start in last.values()) <= self._limits.num_blocks

    def takes_adapters(self, rows: LoraRows) -> bool:
        """Return whether a captured step takes the adapters of rows; see `takes` for the rest."""
        return self._adapters is not None and self._adapters.takes(rows)

    def run(
        self,
        items: Sequence[ScheduledSequence],
        builder: BatchBuilder,
        adapted: LoraRows | None = None,
        counts: Sequence[int] | None = None,
    ) -> ReplayedStep:
        """Compute a step.

        Args:
            items: items that `takes` accepted.
            builder: has their block tables, with a slot for the token of each.
            adapted: rows with adapters that `takes_adapters` accepted; None if no row has an adapter.
            counts: number of consecutive items of each sequence; None if each sequence has one item.
        """
        count, laid = len(items), self._lay_out(items, builder, counts)
        shares = adapted is None and bool(self._sharing_steps) and self._share(laid)
        steps = self._sharing_steps if shares else self._steps if adapted is None else self._adapted_steps
        step = steps[bisect_left(steps, count, key=lambda each: each.size)]
        self._write(laid, step.size, shares)
        if adapted is not None and self._adapters is not None:
            self._adapters.write_adapters(adapted, step.size)
        self._memory.upload()
        builder.put_drawn(self._ids.device, items)
        step.replay()
        return ReplayedStep(self._hidden[:count], self._outputs[:count], self._next_positions.device[:count])

    def run_pass(
        self, items: Sequence[ScheduledSequence], builder: BatchBuilder, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute a pass of an MTP head.

        Args:
            items, builder: see `run`.
            hidden: [n, E], for each item the normed hidden state of the token before it; may be the result of the last
                pass.

        Returns:
            Normed hidden states of the head [n, E], in static memory that the next pass overwrites; and the likeliest
            next tokens [n].
        """
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[: len(items)].copy_(hidden)
        step = self.run(items, builder)
        return step.hidden, step.outputs.clone()

    def _share(self, laid: LaidOut) -> bool:
        """Let each group look for shared prefixes; return whether reading them once pays for any group."""
        found = [group.share(laid.positions, *laid.tables[idx]) for idx, group in self._tokens.items()]
        return any(found)

    def _write(self, laid: LaidOut, size: int, shares: bool) -> None:
        """Write a step and its padding to the host side of static memory."""
        count = laid.positions.numel()
        if laid.input_ids is not None:
            self._ids.host[:count] = laid.input_ids
        self._positions.host[:count] = laid.positions
        torch.add(laid.positions, 1, out=self._next_positions.host[:count])
        if count < size:
            self._ids.host[count:size] = self._positions.host[count:size] = 0
        for idx, states in self._states.items():
            blocks, has_state = laid.tables[idx]
            states.write_states(blocks, has_state, size, laid.counts)
        for idx, tokens in self._tokens.items():
            tables = laid.tables[idx]
            tokens.write_tokens(laid.positions, tables.block_ids, tables.block_starts, size, shares)

    def _lay_out(
        self,
        items: Sequence[ScheduledSequence],
        builder: BatchBuilder | None,
        counts: Sequence[int] | None = None,
    ) -> LaidOut:
        """Lay items out, one row each, with their block tables in static memory; items need a builder."""
        self._memory.wait()
        starts, changed = starts_of(items), None
        known, self._known = self._known, None
        if isinstance(items, DecodeItems) and builder is not None:
            if known is not None and items.seq_ids is known[0]:
                changed = items.changed
            else:
                known = items.seq_ids, self._tables_of(items.seq_ids, builder)
            tables, self._known, ids = known[1], known, None
        else:
            tables = self._tables_of(seq_ids_of(items), builder)
            ids = vector([item.token_ids[0] for item in items])
        laid: list[Any] = []
        for idx, own in enumerate(tables):
            if idx not in self._states:
                laid.append(self._tables[idx].lay(own, starts, changed))
                continue
            first_rows = range(len(own)) if counts is None else list(accumulate(counts[:-1], initial=0))
            laid.append(([own[row].ids[-1] for row in first_rows], [starts[row] > 0 for row in first_rows]))
        return LaidOut(ids, vector(starts), laid, counts)

    def _tables_of(self, seq_ids: Sequence[int], builder: BatchBuilder | None) -> list[list[BlockTable]]:
        """Return the block tables of sequences, by group."""
        rows = [] if builder is None else [builder.tables[seq_id] for seq_id in seq_ids]
        first = self._first_group
        return [[tables[idx] for tables in rows] for idx in range(first, first + len(self._groups))]

    def forget_rows(self) -> None:
        """Forget the last step's block tables: a step that was not replayed may have changed them."""
        self._known = None


class LaidOut(NamedTuple):
    """A step on the host.

    Args:
        input_ids: int64 [n], token of each row; None if the previous step has sampled all of them, on the device.
        positions: int64 [n], position of each row.
        tables: block tables of each group as `PlacedTables`; for a group of states, their blocks and `has_state`; see
            `write_states`.
        counts: see `GraphLadder.run`.
    """

    input_ids: Tensor | None
    positions: Tensor
    tables: list[Any]
    counts: Sequence[int] | None = None


def sharing_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of captured steps that read shared prefixes once: powers of 2, and the largest."""
    return [size for size in _few_sizes(sizes) if size > 1]


def adapted_sizes(decoder: CausalModel, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of captured steps in which rows have adapters: powers of 2, and the largest.

    Adapters of experts cannot be captured: no sizes are returned for them.
    """
    return _few_sizes(sizes) if decoder.step_adapters.can_be_static else []


def _few_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the powers of 2 among sizes, and the largest."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


def _static_group(
    decoder: Decoder, cache: object, storage: Storage, memory: StaticMemory, limits: StaticLimits
) -> StaticTokens | StaticStates:
    """Return the static buffers of a cache group."""
    ops = decoder.ops
    assert isinstance(ops, MakesStaticSteps), "the backend has no static steps"
    if isinstance(storage, StateStorage):
        return ops.static_states(memory, limits)
    assert isinstance(cache, TokenCacheShape)
    group = ops.static_tokens(storage, cache.window, cache.chunk, memory, limits)
    if group is None:
        raise RuntimeError(f"kernels cannot take a cache of {storage.data.dtype} with heads of {storage.head_dim}")
    return group


def limits_of(sizes: Sequence[int], num_blocks: Sequence[int], max_model_len: int, block_size: int) -> StaticLimits:
    """Return the limits of the largest step: all rows at full length, or the tables of a full pool if smaller."""
    longest = sizes[-1] * -(-max_model_len // block_size)
    return StaticLimits(sizes[-1], min(longest, TABLES_PER_POOL * max(num_blocks) + sizes[-1]))
