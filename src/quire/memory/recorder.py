"""A log of every command that memory is given, one short line each, from which all block ids follow again (M10).

A line has what the command needs to be run again, and what came of it:

```
 a SEQ PROMPT PARTED HIT [NAME ...]
                             allocate: for PROMPT tokens, which part from others after PARTED, on a hit of HIT tokens,
                             whose last whole block has this name (all their blocks have these names, where the whole
                             blocks end with a window or chunk and none is needed); where HIT ends inside a block, a
                             last name is that of the block used in part
 s SEQ N LOOKAHEAD SLOTS     append_slots: the sequence has SLOTS slots now, as before if it was refused
 g GRANTED SEQ ...           append_slot_to_all: 1 where each of them has a slot more now, 0 where none has
 k PARENT CHILD SLOTS        fork
 t SEQ SLOTS                 truncate
 p SEQ COMPUTED [NAME ...]   publish: names of the blocks that were published, or merged, by this
 f SEQ SLOTS COMPUTED KEPT [NAME]
                             free: how long the sequence was, 1 where its blocks are to be evicted last, and the name of
                             its published tail, or of the block that has its tokens already
 > SEQ ...                   swap_out: of these sequences together
 < SEQ ...                   swap_in
 l TOKENS NAME ... GROUP:BLOCK:TICKET ...
                             archive.adopt: for a hit of so many tokens, with the names of all its blocks
 r                           reset_prefix_cache
 + PIN TOKENS NAME ...       pin: of so many tokens, with names like a hit; pins are numbered
 - PIN                       unpin
 x [GROUP:SRC>DST ...]       discard_copies: of an earlier take_ops, written like that
 d SEQ [GROUP:START:ID,ID]   take_table_deltas: the block ids that the data plane is told
 o [GROUP:SRC>DST ...]       take_ops: the copies that it is told to make; an `h` follows the id of a host block, a `d`
                             the number of one on disk
 = COUNT ...                 no command: how many there were, and the counts of `Usage`, those of the host tier, if
                             there is one, behind them; every 256 commands and when the last sequence is freed
```

Tokens are not in it. To share a prefix, memory asks of blocks only whether they and all before them are equal; so a
block's name, half of its keyed digest, stands for its tokens and media. A refused pin, an empty delta, and a command
that raised changed nothing (M7), and are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from quire.memory.archive import Archive, FetchedBlock
from quire.memory.chain import DIGEST_BYTES, TokenChain, block_digest
from quire.memory.continuation import tail_of
from quire.memory.manager import KVCacheManager
from quire.memory.ops import BlockCopy, MemoryOps, TableDelta, Tier
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.settings import MemorySettings
from quire.memory.status import PrefixHit

logger = logging.getLogger(__name__)

TITLE = "quire memory log"
VERSION = 4
COUNT_EVERY = 256
# The first fields of `Usage` count blocks, sequences, tokens and events; the others follow from them.
NUM_COUNTS = 9
NUM_HOST_COUNTS = 10
TIER_MARKS = {Tier.DEVICE: "", Tier.HOST: "h", Tier.DISK: "d"}
MOVEMENT = re.compile(r"(\d+):(\d+)([hd]?)>(\d+)([hd]?)")


def keyed_name(digest: bytes, _: bytes) -> str:
    """Return half of a block's digest: nobody without the manager's key can tell the tokens, or guess and compare."""
    return digest[: DIGEST_BYTES // 2].hex()


class RecordedArchive:
    """An archive whose commands are written down with those of its manager.

    Args:
        archive: the manager's.
        write: writes a line of the log.
        name: see `RecordedMemory`.
        block_size: tokens of a block.
    """

    def __init__(
        self, archive: Archive, write: Callable[[str], None], name: Callable[[bytes, bytes], str], block_size: int
    ) -> None:
        self.archive = archive
        self.find_loads = archive.find_loads
        self.saving_ops = archive.saving_ops
        self._write = write
        self._name = name
        self._block_size = block_size

    def adopt(self, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]) -> list[int]:
        """See `Archive.adopt`."""
        adopted = self.archive.adopt(chain, num_blocks, fetched)
        names = _names(self._name, chain, 0, num_blocks)
        blocks = (":".join(map(str, block)) for block in fetched)
        self._write(" ".join([f"l {num_blocks * self._block_size}", *names, *blocks]))
        return adopted


class RecordedMemory:
    """A manager whose commands are written down; it has the verbs that a scheduler and an engine use.

    Args:
        manager: new, made of the settings, and commanded by nobody else.
        settings: go to the first line.
        log: written to, and flushed once for each `take_ops`: with each step. Where that fails (a full disk, say), the
            recording stops with a warning, and memory goes on: the command had its effect already.
        name: what stands for a published block, of its digest and its content; equal for equal blocks only.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        settings: MemorySettings,
        log: TextIO,
        name: Callable[[bytes, bytes], str] = keyed_name,
    ) -> None:
        self.manager = manager
        self.block_size = manager.block_size
        self.groups = manager.groups
        self.arena = manager.arena
        self.pins = manager.pins
        # Questions change nothing: they go straight to the manager.
        self.chain = manager.chain
        self.match_prefix = manager.match_prefix
        self.can_allocate = manager.can_allocate
        self.blocks_missing = manager.blocks_missing
        self.can_ever_hold = manager.can_ever_hold
        self.rollback_limit = manager.rollback_limit
        self.rollback_point = manager.rollback_point
        self.step_limit = manager.step_limit
        self.would_release = manager.would_release
        self.block_table = manager.block_table
        self.can_swap_out = manager.can_swap_out
        self.can_swap_in = manager.can_swap_in
        self.swap_size = manager.swap_size
        self.usage = manager.usage
        self.holders_of = manager.holders_of
        self._log: TextIO | None = log
        self._name = name
        self._num_commands = 0
        self._pins: dict[str, int] = {}
        self._num_pins = 0
        archive = manager.archive
        self.archive = None if archive is None else RecordedArchive(archive, self._write, name, self.block_size)
        self._put(f"{TITLE} {VERSION} {settings.to_json()}")
        self._flush()

    def allocate(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None:
        """See `KVCacheManager.allocate`."""
        self.manager.allocate(seq_id, chain, hit)
        names = self._names(chain, hit.num_tokens)
        if hit.num_copied:
            place = self.groups[0].pool.index.place_of(hit.block_ids[0][-1])
            assert place is not None
            names += f" {self._name(place[0].digest(place[1]), place[0].content(place[1]))}"
        self._write(f"a {seq_id} {len(chain.tokens)} {hit.parted_at} {hit.num_tokens}{names}")

    def append_slots(self, seq_id: int, num_tokens: int, lookahead: int = 0) -> bool:
        """See `KVCacheManager.append_slots`."""
        is_granted = self.manager.append_slots(seq_id, num_tokens, lookahead)
        self._write(f"s {seq_id} {num_tokens} {lookahead} {self.manager.sequences[seq_id].num_slots}")
        return is_granted

    def append_slot_to_each(self, seq_ids: Sequence[int]) -> int:
        """See `BatchCommands.append_slot_to_each`."""
        return next((idx for idx, seq_id in enumerate(seq_ids) if not self.append_slots(seq_id, 1)), len(seq_ids))

    def append_slot_to_all(self, seq_ids: Sequence[int]) -> bool:
        """See `BatchCommands.append_slot_to_all`."""
        is_granted = self.manager.append_slot_to_all(seq_ids)
        self._write(" ".join([f"g {int(is_granted)}", *map(str, seq_ids)]))
        return is_granted

    def fork(self, parent_id: int, child_id: int, child_tokens: list[int]) -> TokenChain:
        """See `KVCacheManager.fork`."""
        chain = self.manager.fork(parent_id, child_id, child_tokens)
        self._write(f"k {parent_id} {child_id} {self.manager.sequences[child_id].num_slots}")
        return chain

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """See `KVCacheManager.truncate`."""
        self.manager.truncate(seq_id, num_tokens)
        self._write(f"t {seq_id} {num_tokens}")

    def publish(self, seq_id: int, num_computed: int) -> None:
        """See `KVCacheManager.publish`."""
        state = self.manager.sequences[seq_id]
        num_before = state.num_published
        self.manager.publish(seq_id, num_computed)
        words = [f"p {seq_id} {num_computed}"]
        if state.num_published > num_before:
            words += _names(self._name, state.chain, num_before, state.num_published)
        self._write(" ".join(words))

    def free(self, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        """See `KVCacheManager.free`."""
        state = self.manager.sequences[seq_id]
        tail = self._tail(state) if is_sound else ""
        self.manager.free(seq_id, retain=retain, is_sound=is_sound)
        self._write(f"f {seq_id} {state.num_slots} {state.num_computed} {int(retain)}{tail}")
        if not self.manager.sequences:
            self._write_counts()

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """See `KVCacheManager.swap_out`."""
        self.manager.swap_out(seq_ids)
        self._write(" ".join([">", *map(str, seq_ids)]))

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """See `KVCacheManager.swap_in`."""
        self.manager.swap_in(seq_ids)
        self._write(" ".join(["<", *map(str, seq_ids)]))

    def reset_prefix_cache(self) -> None:
        """See `KVCacheManager.reset_prefix_cache`."""
        self.manager.reset_prefix_cache()
        self._pins.clear()
        self._write("r")

    def pin(self, name: str, chain: TokenChain) -> int:
        """See `KVCacheManager.pin`."""
        num_tokens = self.manager.pin(name, chain)
        if num_tokens:
            self._pins[name] = self._num_pins
            self._write(f"+ {self._num_pins} {num_tokens}{self._names(chain, num_tokens)}")
            self._num_pins += 1
        return num_tokens

    def unpin(self, name: str) -> None:
        """See `KVCacheManager.unpin`."""
        self.manager.unpin(name)
        self._write(f"- {self._pins.pop(name)}")

    def discard_copies(self, ops: MemoryOps) -> None:
        """See `KVCacheManager.discard_copies`."""
        self.manager.discard_copies(ops)
        self._write(" ".join(["x", *map(_movement, ops.copies)]))

    def take_ops(self) -> MemoryOps:
        """See `KVCacheManager.take_ops`."""
        ops = self.manager.take_ops()
        self._write(" ".join(["o", *map(_movement, ops.copies)]))
        self._flush()
        return ops

    def take_table_deltas(self, seq_id: int) -> tuple[TableDelta, ...]:
        """See `KVCacheManager.take_table_deltas`."""
        deltas = self.manager.take_table_deltas(seq_id)
        if deltas:
            parts = (f" {idx}:{start}:{','.join(map(str, block_ids))}" for idx, start, block_ids in deltas)
            self._write("".join([f"d {seq_id}", *parts]))
        return deltas

    def take_table_deltas_of_each(self, seq_ids: Iterable[int]) -> list[tuple[TableDelta, ...]]:
        """See `BatchCommands.take_table_deltas_of_each`."""
        return [self.take_table_deltas(seq_id) for seq_id in seq_ids]

    def _names(self, chain: TokenChain, num_tokens: int) -> str:
        """Return the name of a prefix' last whole block, which is enough: who published it has named those before."""
        num_blocks = num_tokens // self.block_size
        return "".join(f" {name}" for name in _names(self._name, chain, max(0, num_blocks - 1), num_blocks))

    def _tail(self, state: SequenceMemory) -> str:
        """Return the name of the block where the tokens of a sequence's last one will be found once it is freed."""
        is_found = not state.is_swapped and state.num_resets == self.manager.num_resets
        tail = tail_of(self.groups, state) if is_found else None
        if tail is None:
            return ""
        if tail.place is not None:
            stem, position = tail.place
            return f" {self._name(stem.digest(position), stem.content(position))}"
        parent = state.chain.digest_before(state.num_computed // self.block_size)
        return f" {self._name(block_digest(parent, tail.content), tail.content)}"

    def _write(self, line: str) -> None:
        self._put(line)
        self._num_commands += 1
        if self._num_commands % COUNT_EVERY == 0:
            self._write_counts()

    def _write_counts(self) -> None:
        usage = self.manager.usage()
        counts = (self._num_commands, *usage[:NUM_COUNTS], *(usage.host or ())[:NUM_HOST_COUNTS])
        self._put(" ".join(["=", *map(str, counts)]))

    def close(self) -> None:
        """Write out what is left of the log, and close it; memory may go on, unrecorded."""
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                _warn(error)

    def _put(self, line: str) -> None:
        if self._log is not None:
            try:
                self._log.write(line + "\n")
            except OSError as error:
                self._stop(error)

    def _flush(self) -> None:
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        """Record no more: a log with a command missing could not be replayed past it."""
        log, self._log = self._log, None
        _warn(error)
        # What the log's buffer still holds cannot be written either; its file is let go of all the same.
        if log is not None:
            with suppress(OSError):
                log.close()


def _warn(error: OSError) -> None:
    logger.warning("the recording of memory commands ends here, since it cannot be written: %s", error)


def _names(name: Callable[[bytes, bytes], str], chain: TokenChain, start: int, end: int) -> list[str]:
    """Return the names of a chain's blocks `[start, end)`."""
    digests = chain.digests(end)
    return [name(digests[idx], chain.content(idx)) for idx in range(start, end)]


def _movement(copy: BlockCopy) -> str:
    src, dst = (TIER_MARKS[tier] for tier in (copy.src_tier, copy.dst_tier))
    return f"{copy.group_idx}:{copy.src_id}{src}>{copy.dst_id}{dst}"


def read_movement(word: str) -> BlockCopy:
    """Return the movement that a word of a log stands for.

    Raises:
        ValueError: the word is no movement.
    """
    found = MOVEMENT.fullmatch(word)
    if found is None:
        raise ValueError(f"{word[:40]!r} is no movement of a block")
    group_idx, src_id, src_mark, dst_id, dst_mark = found.groups()
    tiers = {mark: tier for tier, mark in TIER_MARKS.items()}
    return BlockCopy(int(group_idx), int(src_id), int(dst_id), tiers[src_mark], tiers[dst_mark])
