"""A data plane made of plain dictionaries: it obeys plans as the real one does, and checks what it reads.

Every slot remembers which token was written at which position. The next token is a function of what is read back
through the block table, so a block that was shared, copied, merged, evicted or reused wrongly gives other tokens, and
is caught at the moment it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from quire.decoding.drafting import UNKNOWN
from quire.errors import InvariantViolation
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.results import BlockCopy, MemoryOps, Tier
from quire.memory.specs import FullAttention, KVCacheSpec
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, NewSequence, ScheduledSequence, StepPlan, StepResult

# A token id, or what stands for media: a token id, their digest and the row of them.
Token = int | tuple[int, bytes, int]


class _OpenSequence:
    """What the data plane keeps of a sequence between plans."""

    __slots__ = ("_rows", "new_sequence", "tables", "tokens")

    def __init__(self, new_sequence: NewSequence, num_groups: int) -> None:
        self.new_sequence = new_sequence
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        spans = [media.span for media in new_sequence.media]
        self._rows = {
            place: (span.digest, place - span.start) for span in spans for place in range(span.start, span.end)
        }
        self.tokens: list[Token] = []
        self.write(0, new_sequence.token_ids)

    def write(self, start: int, token_ids: Sequence[int]) -> None:
        """Set the tokens from a position on; one that stands for media is known by the row of them too."""
        rows = self._rows
        if rows:
            places = enumerate(token_ids, start)
            self.tokens[start:] = [(token, *rows[place]) if place in rows else token for place, token in places]
        else:
            self.tokens[start:] = token_ids


class SimulatedExecutor:
    """Executes plans over slots that hold `(position, token)`, and of media which they are.

    Args:
        block_size: tokens of a block.
        vocab_size: tokens are drawn from `[0, vocab_size)`.
        specs: of the cache groups, which say what a query reads; one of full attention unless given.

    Raises:
        InvariantViolation: M3, a plan writes to a slot through two tables at once; M5, a table does not read back as
            its sequence; S1, a plan opens a sequence that is open, or names one that is not.
    """

    def __init__(self, block_size: int, vocab_size: int, specs: Sequence[KVCacheSpec] = ()) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.specs = tuple(specs) or (FullAttention(block_size=block_size),)
        self.num_computed_tokens = 0
        # By group and slot, for each tier.
        self._tiers: dict[Tier, dict[tuple[int, int], tuple[int, Token]]] = {tier: {} for tier in Tier}
        self._slots = self._tiers[Tier.DEVICE]
        # By tier, group and block.
        self._states: dict[tuple[Tier, int, int], tuple[Token, ...]] = {}
        self._open: dict[int, _OpenSequence] = {}

    @property
    def num_open(self) -> int:
        """Sequences that are known: opened and not closed."""
        return len(self._open)

    def execute(self, plan: StepPlan) -> StepResult:
        """Perform the copies, write the step's tokens, read each sequence back and draw."""
        for seq_id in plan.finished_ids:
            del self._open[seq_id]
        for copy in plan.ops.copies:
            self._copy_block(copy)
        written: dict[tuple[int, int], int] = {}
        items = [self._write(item, written) for item in plan.items]
        for item in items:
            self._read(item)
        found = tuple(self._find_candidates(group) for group in plan.beams)
        searching = {seq_id for group in plan.beams for seq_id in group.seq_ids}
        drawing = [item._replace(num_samples=0) if item.seq_id in searching else item for item in items]
        return StepResult(plan.tick, tuple(map(self._draw, drawing)), found)

    def predict_next(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        """Return the token that comes after what a sequence has computed and these; None where it is not open."""
        sequence = self._open.get(seq_id)
        if sequence is None:
            return None
        return self._next_token(sequence.new_sequence, [*sequence.tokens, *token_ids], 0)

    def measure_copies(self) -> None:
        """Return None: time has no meaning here."""

    def move(self, ops: MemoryOps) -> None:
        """Perform movements without a step."""
        for copy in ops.copies:
            self._copy_block(copy)

    def close(self) -> None:
        """Forget everything."""
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
        """Bring the item's table up to date and store its tokens; return the item with all of its drafts."""
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
        """Put guesses in place of drafts that are left to the data plane: two right ones, and one that may be wrong."""
        if UNKNOWN not in item.token_ids:
            return item
        sequence = self._open[item.seq_id]
        token_ids = list(item.token_ids[: len(item.token_ids) - item.num_draft])
        while len(token_ids) < len(item.token_ids):
            context = [*sequence.tokens[: item.start], *token_ids]
            draft = self._next_token(sequence.new_sequence, context, 0)
            token_ids.append(draft if len(context) % 3 else (draft + 1) % self.vocab_size)
        return item._replace(token_ids=tuple(token_ids))

    def _claim(self, slot: tuple[int, int], seq_id: int, written: dict[tuple[int, int], int]) -> None:
        if written.setdefault(slot, seq_id) != seq_id:
            raise InvariantViolation("M3", f"{written[slot]} and {seq_id} both write slot {slot}")

    def _advance_state(
        self, item: ScheduledSequence, group_idx: int, block_id: int, written: dict[tuple[int, int], int]
    ) -> None:
        """Read a state, which must sum up exactly what is before the item's tokens, and write the one after them."""
        place, tokens = (Tier.DEVICE, group_idx, block_id), self._open[item.seq_id].tokens
        self._claim((group_idx, block_id), item.seq_id, written)
        if block_id == NULL_BLOCK:
            raise InvariantViolation("M3", "the null block is never read or written")
        found = self._states.get(place, ()) if item.start else ()
        if found != tuple(tokens[: item.start]):
            raise InvariantViolation("M5", f"sequence {item.seq_id} finds a state of {len(found)} other tokens")
        self._states[place] = tuple(tokens[: item.start + len(item.token_ids)])

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self.block_size]
        if block_id == 0:
            raise InvariantViolation("M3", "the null block is never read or written")
        return block_id * self.block_size + position % self.block_size

    def _read(self, item: ScheduledSequence) -> None:
        """Read through the tables all that the item's queries read."""
        sequence = self._open[item.seq_id]
        end = item.start + len(item.token_ids)
        for group_idx, (spec, table) in enumerate(zip(self.specs, sequence.tables, strict=True)):
            if spec.is_recurrent:
                continue
            # What the first query reads and what lies behind it is all that the later ones read.
            for position in range(spec.first_live_token(item.start), end):
                content = self._slots.get((group_idx, self._slot(table, position)))
                if content != (position, sequence.tokens[position]):
                    raise InvariantViolation("M5", f"sequence {item.seq_id} reads {content} at position {position}")

    def _draw(self, item: ScheduledSequence) -> ItemResult:
        """Draw tokens that depend on the whole context: a token for each sample, or a run over the drafts."""
        sequence = self._open[item.seq_id]
        end = item.start + len(item.token_ids)
        if item.num_draft:
            run: list[int] = []
            for place in range(end - item.num_draft, end + 1):
                run.append(self._next_token(sequence.new_sequence, sequence.tokens[:place], 0))
                if place < end and item.token_ids[place - item.start] != run[-1]:
                    break
            return ItemResult(item.seq_id, tuple(run), draft=tuple(item.token_ids[-item.num_draft :]))
        context = sequence.tokens[:end]
        return ItemResult(
            item.seq_id, tuple(self._next_token(sequence.new_sequence, context, i) for i in range(item.num_samples))
        )

    def _next_token(self, new_sequence: NewSequence, context: list[Token], draw_idx: int) -> int:
        """Return a token that is a function of seed, sample and context, and not a suppressed one."""
        allowed = self._allowed_ids(new_sequence, len(context))
        return allowed[_number(new_sequence.seed, new_sequence.sample_idx + draw_idx, context) % len(allowed)]

    def _allowed_ids(self, new_sequence: NewSequence, num_tokens: int) -> list[int]:
        banned = (
            new_sequence.suppressed_ids if num_tokens < new_sequence.num_prompt + new_sequence.params.min_tokens else ()
        )
        return [token_id for token_id in range(self.vocab_size) if token_id not in banned]

    def _find_candidates(self, group: BeamGroup) -> tuple[Candidate, ...]:
        """Return the best continuations of beams, by log probabilities that depend on the whole context."""
        found = []
        for parent_idx, (seq_id, score) in enumerate(zip(group.seq_ids, group.scores, strict=True)):
            new_sequence, context = self._open[seq_id].new_sequence, self._open[seq_id].tokens
            logprobs = log_probabilities(new_sequence.seed, context, self.vocab_size)
            found += [
                Candidate(parent_idx, token_id, score + logprobs[token_id])
                for token_id in self._allowed_ids(new_sequence, len(context))
            ]
        return tuple(sorted(found, key=lambda candidate: -candidate.score)[: group.num_candidates])


def log_probabilities(seed: int, context: Sequence[Token], vocab_size: int) -> list[float]:
    """Return what each token behind a context is worth to a beam: a function of both, from -8 to 0."""
    number = _number(seed, 0, context)
    # Multiples of an odd number, modulo a power of two, are spread over all that there is.
    return [-8.0 * (number * (2 * token_id + 1) % 2**64) / 2**64 for token_id in range(vocab_size)]


def _number(seed: int, which: int, context: Sequence[Token]) -> int:
    """Return 64 bits that are a function of a seed, a number and a context."""
    return int.from_bytes(blake2b(repr((seed, which, list(context))).encode(), digest_size=8).digest(), "little")


class CountingExecutor:
    """Draws a fixed token for every item and does nothing else: for measuring the control plane alone.

    Args:
        token_id: the token that every item draws.
    """

    def __init__(self, token_id: int = 1) -> None:
        self.token_id = token_id

    def execute(self, plan: StepPlan) -> StepResult:
        """Draw."""
        token = (self.token_id,)
        return StepResult(plan.tick, tuple(ItemResult(item.seq_id, token * item.num_samples) for item in plan.items))

    def measure_copies(self) -> None:
        """Return None: there is nothing to copy."""

    def move(self, ops: MemoryOps) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
