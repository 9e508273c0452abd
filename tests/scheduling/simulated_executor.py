"""A simulated data plane of plain dictionaries, which executes plans and checks every read of the KV cache.

Every slot stores the token and the position that were written to it. Each step compares all visible slots, found
through the block tables, with the sequence's tokens, so a block that was shared, copied, merged, evicted or reused
wrongly is detected when it is read. The next token is a hash of the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from quire.errors import InvariantViolation
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.results import BlockCopy, MemoryOps, Tier
from quire.memory.specs import FullAttention, KVCacheSpec
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, NewSequence, ScheduledSequence, StepPlan, StepResult
from quire.sequences.decoding.drafting import UNKNOWN

# A token id; or, for a placeholder of media, the token id, the digest of the media and the row of their embeddings.
Token = int | tuple[int, bytes, int]


class _OpenSequence:
    """State of an open sequence between plans."""

    __slots__ = ("_rows", "new_sequence", "tables", "tokens")

    def __init__(self, new_sequence: NewSequence, num_groups: int) -> None:
        self.new_sequence = new_sequence
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        spans = [media.span for media in new_sequence.media]
        self._rows = {
            position: (span.digest, position - span.start) for span in spans for position in range(span.start, span.end)
        }
        self.tokens: list[Token] = []
        self.write(0, new_sequence.token_ids)

    def write(self, start: int, token_ids: Sequence[int]) -> None:
        """Replace the tokens from a position on; placeholders of media are stored with digest and row."""
        rows = self._rows
        if rows:
            numbered = enumerate(token_ids, start)
            self.tokens[start:] = [
                (token, *rows[position]) if position in rows else token for position, token in numbered
            ]
        else:
            self.tokens[start:] = token_ids


class SimulatedExecutor:
    """Executes plans over slots that store `(position, token)`."""

    def __init__(self, block_size: int, vocab_size: int, specs: Sequence[KVCacheSpec] = ()) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.specs = tuple(specs) or (FullAttention(block_size=block_size),)
        self.num_computed_tokens = 0
        # Slots of each tier, by group and slot.
        self._tiers: dict[Tier, dict[tuple[int, int], tuple[int, Token]]] = {tier: {} for tier in Tier}
        self._slots = self._tiers[Tier.DEVICE]
        # Recurrent states, by tier, group and block.
        self._states: dict[tuple[Tier, int, int], tuple[Token, ...]] = {}
        self._open: dict[int, _OpenSequence] = {}

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self._open)

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, write the step's tokens, check each sequence's slots, and sample tokens."""
        for seq_id in plan.finished_ids:
            del self._open[seq_id]
        for copy in plan.ops.copies:
            self._copy_block(copy)
        written: dict[tuple[int, int], int] = {}
        items = [self._write(item, written) for item in plan.items]
        for item in items:
            self._read(item)
        candidates = tuple(self._find_candidates(group) for group in plan.beams)
        searching = {seq_id for group in plan.beams for seq_id in group.seq_ids}
        drawing = [item._replace(num_samples=0) if item.seq_id in searching else item for item in items]
        return StepResult(plan.tick, tuple(map(self._draw, drawing)), candidates)

    def predict_next(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        """Return the next token after a sequence's computed tokens and `token_ids`; None if it is not open."""
        sequence = self._open.get(seq_id)
        if sequence is None:
            return None
        return self._next_token(sequence.new_sequence, [*sequence.tokens, *token_ids], 0)

    def measure_copies(self) -> None:
        """Do nothing: copies take no time here."""

    def move(self, ops: MemoryOps) -> None:
        """Copy blocks without a step."""
        for copy in ops.copies:
            self._copy_block(copy)

    def close(self) -> None:
        """Delete all state."""
        for slots in self._tiers.values():
            slots.clear()
        self._states.clear()
        self._open.clear()

    def _copy_block(self, copy: BlockCopy) -> None:
        if self.specs[copy.group_idx].is_recurrent:
            state = self._states.get((copy.src_tier, copy.group_idx, copy.src_id), ())
            self._states[copy.dst_tier, copy.group_idx, copy.dst_id] = state
            return
        source, target = self._tiers[copy.src_tier], self._tiers[copy.dst_tier]
        for offset in range(self.block_size):
            content = source.get((copy.group_idx, copy.src_id * self.block_size + offset))
            slot = copy.group_idx, copy.dst_id * self.block_size + offset
            if content is None:
                target.pop(slot, None)
            else:
                target[slot] = content

    def _write(self, item: ScheduledSequence, written: dict[tuple[int, int], int]) -> ScheduledSequence:
        """Update the item's tables and write its tokens; return the item with all of its drafts."""
        if (item.new_sequence is None) != (item.seq_id in self._open):
            raise InvariantViolation("S1", f"sequence {item.seq_id} is opened twice, or was never opened")
        if item.new_sequence is not None:
            self._open[item.seq_id] = _OpenSequence(item.new_sequence, len(self.specs))
        sequence = self._open[item.seq_id]
        item = self._fill_drafts(item)
        sequence.write(item.start, item.token_ids)
        for delta in item.table_deltas:
            sequence.tables[delta.group_idx][delta.start :] = delta.block_ids
        for group_idx, (spec, table) in enumerate(zip(self.specs, sequence.tables, strict=True)):
            if spec.is_recurrent:
                self._advance_state(item, group_idx, table[-1], written)
                continue
            for position in range(item.start, len(sequence.tokens)):
                slot = group_idx, self._slot(table, position)
                self._claim(slot, item.seq_id, written)
                self._slots[slot] = (position, sequence.tokens[position])
        self.num_computed_tokens += len(item.token_ids)
        return item

    def _fill_drafts(self, item: ScheduledSequence) -> ScheduledSequence:
        """Return the item with drafts in place of placeholders.

        A draft is right unless the length of its context is a multiple of 3.
        """
        if not item.num_draft or item.token_ids[-1] != UNKNOWN:
            return item
        sequence = self._open[item.seq_id]
        token_ids = list(item.token_ids[: len(item.token_ids) - item.num_draft])
        while len(token_ids) < len(item.token_ids):
            context = [*sequence.tokens[: item.start], *token_ids]
            draft = self._next_token(sequence.new_sequence, context, 0)
            token_ids.append((draft + (len(context) % 3 == 0)) % self.vocab_size)
        return item._replace(token_ids=tuple(token_ids))

    def _claim(self, slot: tuple[int, int], seq_id: int, written: dict[tuple[int, int], int]) -> None:
        if written.setdefault(slot, seq_id) != seq_id:
            raise InvariantViolation("M3", f"{written[slot]} and {seq_id} both write slot {slot}")

    def _advance_state(
        self, item: ScheduledSequence, group_idx: int, block_id: int, written: dict[tuple[int, int], int]
    ) -> None:
        """Read the recurrent state, which must cover exactly the tokens before the item, and write the next state."""
        key, tokens = (Tier.DEVICE, group_idx, block_id), self._open[item.seq_id].tokens
        self._claim((group_idx, block_id), item.seq_id, written)
        if block_id == NULL_BLOCK:
            raise InvariantViolation("M3", "the null block is never read or written")
        state = self._states.get(key, ()) if item.start else ()
        if state != tuple(tokens[: item.start]):
            raise InvariantViolation("M5", f"sequence {item.seq_id} finds a state of {len(state)} other tokens")
        self._states[key] = tuple(tokens[: item.start + len(item.token_ids)])

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self.block_size]
        if block_id == 0:
            raise InvariantViolation("M3", "the null block is never read or written")
        return block_id * self.block_size + position % self.block_size

    def _read(self, item: ScheduledSequence) -> None:
        """Check all slots that the item's queries read, through the block tables."""
        sequence = self._open[item.seq_id]
        end = item.start + len(item.token_ids)
        for group_idx, (spec, table) in enumerate(zip(self.specs, sequence.tables, strict=True)):
            if spec.is_recurrent:
                continue
            # The first query reads the earliest slots.
            for position in range(spec.first_live_token(item.start), end):
                content = self._slots.get((group_idx, self._slot(table, position)))
                if content != (position, sequence.tokens[position]):
                    raise InvariantViolation("M5", f"sequence {item.seq_id} reads {content} at position {position}")

    def _draw(self, item: ScheduledSequence) -> ItemResult:
        """Return sampled tokens: one for each sample, or the accepted drafts and one more token."""
        sequence = self._open[item.seq_id]
        end = item.start + len(item.token_ids)
        if item.num_draft:
            run: list[int] = []
            for position in range(end - item.num_draft, end + 1):
                run.append(self._next_token(sequence.new_sequence, sequence.tokens[:position], 0))
                if position < end and item.token_ids[position - item.start] != run[-1]:
                    break
            return ItemResult(item.seq_id, tuple(run), draft=tuple(item.token_ids[-item.num_draft :]))
        context = sequence.tokens[:end]
        return ItemResult(
            item.seq_id, tuple(self._next_token(sequence.new_sequence, context, i) for i in range(item.num_samples))
        )

    def _next_token(self, new_sequence: NewSequence, context: list[Token], draw_idx: int) -> int:
        """Return a token as a hash of seed, sample and context; suppressed tokens are excluded."""
        allowed = self._allowed_ids(new_sequence, len(context))
        return allowed[_number(new_sequence.seed, new_sequence.sample_idx + draw_idx, context) % len(allowed)]

    def _allowed_ids(self, new_sequence: NewSequence, num_tokens: int) -> list[int]:
        banned = (
            new_sequence.suppressed_ids if num_tokens < new_sequence.num_prompt + new_sequence.params.min_tokens else ()
        )
        return [token_id for token_id in range(self.vocab_size) if token_id not in banned]

    def _find_candidates(self, group: BeamGroup) -> tuple[Candidate, ...]:
        """Return the best candidates of a beam group, by log probabilities that depend on the whole context."""
        candidates = []
        for parent_idx, (seq_id, score) in enumerate(zip(group.seq_ids, group.scores, strict=True)):
            new_sequence, context = self._open[seq_id].new_sequence, self._open[seq_id].tokens
            logprobs = log_probabilities(new_sequence.seed, context, self.vocab_size)
            candidates += [
                Candidate(parent_idx, token_id, score + logprobs[token_id])
                for token_id in self._allowed_ids(new_sequence, len(context))
            ]
        return tuple(sorted(candidates, key=lambda candidate: -candidate.score)[: group.num_candidates])


def log_probabilities(seed: int, context: Sequence[Token], vocab_size: int) -> list[float]:
    """Return a log probability from -8 to 0 for each token after a context, as a function of seed and context."""
    number = _number(seed, 0, context)
    # Odd multiples, modulo a power of two, spread over the whole range.
    return [-8.0 * (number * (2 * token_id + 1) % 2**64) / 2**64 for token_id in range(vocab_size)]


def _number(seed: int, index: int, context: Sequence[Token]) -> int:
    """Return a 64-bit hash of a seed, an index and a context."""
    return int.from_bytes(blake2b(repr((seed, index, list(context))).encode(), digest_size=8).digest(), "little")


class CountingExecutor:
    """Returns a fixed token for every sample, to measure the control plane alone."""

    def __init__(self, token_id: int = 1) -> None:
        self.token_id = token_id

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the fixed token for each sample."""
        token = (self.token_id,)
        return StepResult(plan.tick, tuple(ItemResult(item.seq_id, token * item.num_samples) for item in plan.items))

    def measure_copies(self) -> None:
        """Do nothing: no blocks are stored."""

    def move(self, ops: MemoryOps) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
