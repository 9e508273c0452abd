"""A log of every command of a memory manager, one short line each; a replay gives the same block ids (M10).

A line has the command's arguments and its result:

```
 a SEQ PROMPT PARTED HIT [NAME ...]
                             allocate: PROMPT tokens, diverging from others after PARTED, on a hit of HIT tokens,
                             whose last whole block has this name; if HIT ends inside a block, the last name is the
                             name of the block used in part
 s SEQ N LOOKAHEAD SLOTS     append_slots: the sequence has SLOTS slots now, unchanged if it was refused
 g GRANTED SEQ ...           append_slots, atomic: GRANTED is 1 if each got one more slot, 0 if none did
 k PARENT CHILD SLOTS        fork
 t SEQ SLOTS                 truncate
 p SEQ COMPUTED [NAME ...]   publish: names of the blocks that were published, or merged, by this
 f SEQ SLOTS COMPUTED KEPT [NAME]
                             free: the sequence's lengths, 1 if its blocks are retained (evicted last), plus 2 if it is
                             not sound, and the name of its published tail, or of the block that already has its tokens
 > SEQ ...                   swap_out: these sequences together
 < SEQ ...                   swap_in
 l TOKENS NAME ... GROUP:BLOCK:TICKET ...
                             archive.publish_loaded: for a hit of TOKENS tokens, with the names of all its blocks
 r                           reset_prefix_cache
 + PIN TOKENS [NAME]         pin: TOKENS tokens, with the name of their last block; pins are numbered
 - PIN                       unpin
 x [GROUP:SRC>DST ...]       lost_copies.discard: the copies of an earlier take_ops, in its format
 d SEQ [GROUP:START:ID,ID]   take_table_deltas: the block ids that are sent to the data plane
 o [GROUP:SRC>DST ...]       take_ops: the copies for the data plane; an `h` follows the id of a host block, a `d` the
                             ticket or index of a disk block
 = COUNT ...                 no command: the number of commands so far, the counts of `Usage`, then the counts of the
                             host tier, if there is one; with the first `o` after every 256 commands, and when the last
                             sequence is freed
```

The log has no tokens. Prefix sharing depends only on the equality of blocks and of all blocks before them; so a block's
name, half of its keyed digest, stands for its tokens and media. A refused pin, an empty delta, and a command that
raised an error changed nothing (M7), and are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from quire.memory.command_observer import CommandObserver
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.token_chain import DIGEST_BYTES, TokenChain
from quire.memory.recording.settings import MemorySettings
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, PrefixHit, TableDelta, Tier
from quire.memory.sequence_blocks import SequenceBlocks

logger = logging.getLogger(__name__)

TITLE = "quire memory log"
ENDED = "the recording of memory commands ends here, since it cannot be written: %s"
VERSION = 4
COUNT_EVERY = 256
# The first fields of `Usage` count blocks, sequences, tokens and events; the others follow from them.
NUM_COUNTS = 9
NUM_HOST_COUNTS = 10
TIER_MARKS = {Tier.DEVICE: "", Tier.HOST: "h", Tier.DISK: "d"}
MOVEMENT = re.compile(r"(\d+):(\d+)([hd]?)>(\d+)([hd]?)")


def keyed_name(digest: bytes, _: bytes) -> str:
    """Return half of a block's digest: without the manager's key the tokens cannot be guessed and compared."""
    return digest[: DIGEST_BYTES // 2].hex()


class MemoryRecorder(CommandObserver):
    """Writes a manager's commands to a log.

    Args:
        manager: new manager, built from the settings; it reports its commands to the recorder from now on.
        settings: content of the first line.
        log: file, flushed at each `take_ops`, once a step. If a write fails (a full disk, for example), the recording
            stops with a warning, and the manager continues: the command has already taken effect.
        name: function from the digest and content of a published block to its name; equal for equal blocks only.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        settings: MemorySettings,
        log: TextIO,
        name: Callable[[bytes, bytes], str] = keyed_name,
    ) -> None:
        self.manager = manager
        self._log: TextIO | None = log
        self._name = name
        self._num_commands = 0
        self._next_counts = COUNT_EVERY
        self._pins: dict[str, int] = {}
        self._num_pins = 0
        self._put(f"{TITLE} {VERSION} {settings.to_json()}", flushes=True)
        manager.tables.observer = self

    # ---- events; see `CommandObserver` ----

    def allocated(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None:
        names = self._last_name(chain, hit.num_tokens)
        if hit.num_copied:
            node_position = self.manager.groups[0].pool.index.position_of(hit.block_ids[0][-1])
            assert node_position is not None
            names += self._name_at(node_position)
        self._write(f"a {seq_id} {len(chain.tokens)} {hit.diverged_at} {hit.num_tokens}{names}")

    def appended(
        self, seq_ids: Sequence[int], num_tokens: int, lookahead: int, num_granted: int, *, atomic: bool
    ) -> None:
        if atomic:
            self._write(_joined("g", int(num_granted == len(seq_ids)), *seq_ids))
            return
        # The first refused sequence is recorded too: a replay repeats the refusal.
        for seq_id in seq_ids[: num_granted + 1]:
            self._write(f"s {seq_id} {num_tokens} {lookahead} {self.manager.sequences[seq_id].num_slots}")

    def forked(self, parent_id: int, child_id: int, num_slots: int) -> None:
        self._write(f"k {parent_id} {child_id} {num_slots}")

    def truncated(self, seq_id: int, num_tokens: int) -> None:
        self._write(f"t {seq_id} {num_tokens}")

    def published(self, seq_id: int, state: SequenceBlocks, num_before: int) -> None:
        names = self._names(state.chain, num_before, state.num_published) if state.num_published > num_before else ()
        self._write(_joined("p", seq_id, state.num_computed, *names))

    def freed(
        self, seq_id: int, state: SequenceBlocks, *, retain: bool, is_sound: bool, tail: NodePosition | None
    ) -> None:
        name = "" if tail is None else self._name_at(tail)
        kept = int(retain) + 2 * (not is_sound)
        self._write(f"f {seq_id} {state.num_slots} {state.num_computed} {kept}{name}")
        if not self.manager.sequences:
            self._put(self._counts())

    def swapped_out(self, seq_ids: Sequence[int]) -> None:
        self._write(_joined(">", *seq_ids))

    def swapped_in(self, seq_ids: Sequence[int]) -> None:
        self._write(_joined("<", *seq_ids))

    def was_reset(self) -> None:
        self._pins.clear()
        self._write("r")

    def pinned(self, name: str, chain: TokenChain, num_tokens: int) -> None:
        self._pins[name] = self._num_pins
        self._write(f"+ {self._num_pins} {num_tokens}{self._last_name(chain, num_tokens)}")
        self._num_pins += 1

    def unpinned(self, name: str) -> None:
        self._write(f"- {self._pins.pop(name)}")

    def copies_discarded(self, ops: MemoryOps) -> None:
        self._write(_joined("x", *map(_movement, ops.copies)))

    def ops_taken(self, ops: MemoryOps) -> None:
        line = _joined("o", *map(_movement, ops.copies))
        self._num_commands += 1
        if self._num_commands >= self._next_counts:
            line += "\n" + self._counts()
        self._put(line, flushes=True)

    def deltas_taken(self, seq_ids: Sequence[int], deltas: Sequence[tuple[TableDelta, ...]]) -> None:
        for seq_id, changed in zip(seq_ids, deltas, strict=True):
            if changed:
                parts = (f"{idx}:{start}:{','.join(map(str, block_ids))}" for idx, start, block_ids in changed)
                self._write(_joined("d", seq_id, *parts))

    def loads_published(self, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]) -> None:
        blocks = (":".join(map(str, block)) for block in fetched)
        num_tokens = num_blocks * self.manager.block_size
        self._write(_joined("l", num_tokens, *self._names(chain, 0, num_blocks), *blocks))

    # ---- the log ----

    def _names(self, chain: TokenChain, start: int, end: int) -> list[str]:
        """Return the names of a chain's blocks `[start, end)`."""
        digests = chain.digests(end)
        return [self._name(digests[idx], chain.content(idx)) for idx in range(start, end)]

    def _last_name(self, chain: TokenChain, num_tokens: int) -> str:
        """Return the name of a prefix's last whole block: the log has already named the blocks before it."""
        num_blocks = num_tokens // self.manager.block_size
        return "".join(f" {name}" for name in self._names(chain, max(0, num_blocks - 1), num_blocks))

    def _name_at(self, node_position: NodePosition) -> str:
        node, position = node_position
        return f" {self._name(node.digest(position), node.content(position))}"

    def _write(self, line: str) -> None:
        self._put(line)
        self._num_commands += 1

    def _counts(self) -> str:
        self._next_counts = self._num_commands + COUNT_EVERY
        usage = self.manager.usage()
        counts = (self._num_commands, *usage[:NUM_COUNTS], *(usage.host or ())[:NUM_HOST_COUNTS])
        return _joined("=", *counts)

    def close(self) -> None:
        """Write the rest of the log, and close it; later commands are not recorded."""
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                logger.warning(ENDED, error)

    def _put(self, text: str, *, flushes: bool = False) -> None:
        if self._log is None:
            return
        try:
            self._log.write(text + "\n")
            if flushes:
                self._log.flush()
        except OSError as error:
            # A log that lacks a command could not be replayed past it. The file is closed without its buffer.
            logger.warning(ENDED, error)
            with suppress(OSError):
                self._log.close()
            self._log = None


def _joined(*words: object) -> str:
    return " ".join(map(str, words))


def _movement(copy: BlockCopy) -> str:
    src, dst = (TIER_MARKS[tier] for tier in (copy.src_tier, copy.dst_tier))
    return f"{copy.group_idx}:{copy.src_id}{src}>{copy.dst_id}{dst}"


def read_movement(word: str) -> BlockCopy:
    """Return the copy that a word of a log stands for."""
    match = MOVEMENT.fullmatch(word)
    if match is None:
        raise ValueError(f"the word is not a movement of a block: {word[:40]!r}")
    group_idx, src_id, src_mark, dst_id, dst_mark = match.groups()
    tiers = {mark: tier for tier, mark in TIER_MARKS.items()}
    return BlockCopy(int(group_idx), int(src_id), int(dst_id), tiers[src_mark], tiers[dst_mark])
