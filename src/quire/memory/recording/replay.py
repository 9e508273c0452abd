"""Replay of a log of memory commands: block ids must equal the recorded ids (M10), and every invariant must hold.

The replay records its own commands. Each line that it writes must equal the line that it read.
"""

from __future__ import annotations

import io
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.errors import InvariantViolation, LogError
from quire.memory.invariants import check
from quire.memory.prefix.token_chain import Namespace, TokenChain
from quire.memory.recording.recorder import TITLE, VERSION, MemoryRecorder, read_movement
from quire.memory.recording.settings import MemorySettings
from quire.memory.results import FetchedBlock, MemoryOps
from quire.memory.usage import Usage

OF_A_SEQUENCE = frozenset("sktpfd")
COUNTS = "="
MAX_SHOWN = 120
UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Fault:
    """The first fault of a replay.

    Args:
        line: line number in the log, from 1.
        detail: found value and expected value, or the error.
    """

    line: int
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay.

    Args:
        num_commands: number of commands run, by verb.
        num_sequences: number of sequences opened by `allocate` or `fork`; a resumed one counts again.
        hit_tokens: number of tokens of all prefix hits.
        num_checks: number of checks of all invariants.
        is_truncated: True if the last line is cut off; it was not run.
        usage: usage at the end, or at the fault.
        fault: first fault; None if the whole log ran as recorded.
    """

    num_commands: dict[str, int]
    num_sequences: int
    hit_tokens: int
    num_checks: int
    is_truncated: bool
    usage: Usage
    fault: Fault | None


def replay(lines: Iterable[str], check_every: int = 1) -> Report:
    """Run a log's commands until the first fault.

    Args:
        lines: lines of the log, with their line ends.
        check_every: number of commands between two checks of all invariants; a check always follows the last command.

    Raises:
        LogError: the first line is not the first line of a log, or of another version.
    """
    lines = iter(lines)
    run = _Replay.of(next(lines, ""))
    fault = None
    try:
        run.take_all(lines, check_every)
    except InvariantViolation as error:
        fault = Fault(run.line_number, str(error))
    except Exception as error:  # any error of a command is reported with its line
        fault = Fault(run.line_number, f"{type(error).__name__}: {error}")
    return Report(
        dict(run.num_commands),
        run.num_commands["allocate"] + run.num_commands["fork"],
        run.hit_tokens,
        run.num_checks,
        run.is_truncated,
        run.memory.usage(),
        fault,
    )


@dataclass(slots=True)
class _Blocks:
    """Substitute tokens for named blocks: every token of a block, or of a tail, is the number of the block's name.

    So two blocks have tokens in common only if the log names one as the partial hit of the other.

    Args:
        names: names by number.
        parents: number of the block before each; 0 for the first block, and before a block that is not full yet.
        numbers: numbers by name.
    """

    names: list[str] = field(default_factory=lambda: [UNKNOWN])
    parents: list[int] = field(default_factory=lambda: [0])
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str, parent: int) -> int:
        """Return a name's number; an unknown name gets a new one."""
        number = self.numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
            self.parents.append(parent)
        return number

    def name(self, _: bytes, content: bytes) -> str:
        """Return the name of a replayed block from its substitute tokens."""
        return self.names[array("I", content)[0]]

    def prefix(self, name: str, block_size: int) -> list[int]:
        """Return the tokens of a block and of all before it."""
        tokens: list[int] = []
        if name not in self.numbers:
            raise ValueError(f"no published block has the name {name!r}")
        number = self.numbers[name]
        while number:
            tokens += [number] * block_size
            number = self.parents[number]
        tokens.reverse()
        return tokens


class _Replay:
    """One replay: a memory manager, and the log that it writes."""

    def __init__(self, settings: MemorySettings) -> None:
        self._blocks = _Blocks()
        self._log = io.StringIO()
        self.memory = settings.build()
        MemoryRecorder(self.memory, settings, self._log, self._blocks.name)
        self._written = deque(self._new_lines()[1:])
        self.num_commands: Counter[str] = Counter()
        self.hit_tokens = 0
        self.num_checks = 0
        self.line_number = 1
        self.is_truncated = False
        self._num_unchecked = 0
        self._runs: dict[str, tuple[str, Callable[[list[str]], object]]] = {
            "a": ("allocate", self._allocate),
            "s": ("append_slots", self._append_slots),
            "g": (
                "append_slot_to_all",
                lambda words: self.memory.append_slots([int(word) for word in words[1:]], atomic=True),
            ),
            "k": ("fork", self._fork),
            "t": ("truncate", self._truncate),
            "p": ("publish", self._publish),
            "f": ("free", self._free),
            ">": ("swap_out", lambda words: self.memory.swap_out([int(word) for word in words])),
            "<": ("swap_in", lambda words: self.memory.swap_in([int(word) for word in words])),
            "l": ("publish_loaded", self._adopt),
            "r": ("reset_prefix_cache", lambda _: self.memory.reset_prefix_cache()),
            "+": ("pin", self._pin),
            "-": ("unpin", lambda words: self.memory.unpin(words[0])),
            "d": ("take_table_deltas", lambda words: self.memory.take_table_deltas((int(words[0]),))),
            "o": ("take_ops", lambda _: self.memory.take_ops()),
            "x": (
                "discard_copies",
                lambda words: self.memory.lost_copies.discard(MemoryOps(tuple(map(read_movement, words)))),
            ),
        }

    @classmethod
    def of(cls, header: str) -> _Replay:
        """Start a replay with the settings of a log's first line."""
        if not header.startswith(f"{TITLE} "):
            raise LogError(f"this is not a log of memory commands: its first line does not start with {TITLE!r}")
        version, _, settings = header.rstrip("\n").removeprefix(f"{TITLE} ").partition(" ")
        if version != str(VERSION):
            raise LogError(f"the log has version {version[:20]}, and only version {VERSION} can be replayed")
        try:
            return cls(MemorySettings.from_json(settings))
        except (KeyError, ValueError) as error:
            raise LogError(f"the first line of the log is damaged: {error}") from error

    def take_all(self, lines: Iterable[str], check_every: int) -> None:
        """Run the lines after the first; see `replay`."""
        for line in lines:
            self.line_number += 1
            if not line.endswith("\n"):
                self.is_truncated = True
                break
            self._take(line[:-1])
            if self._num_unchecked >= check_every:
                self._check()
        if self._num_unchecked:
            self._check()

    def _take(self, line: str) -> None:
        """Run a line's command and compare its result with the line; lines of counts are only compared."""
        if not self._written and not line.startswith(COUNTS):
            self._command(line)
            self._written += self._new_lines()
        written = self._written.popleft() if self._written else "nothing"
        if written != line:
            raise InvariantViolation("M10", f"the log says {_shown(line)}, the replay {_shown(written)}")

    def _command(self, line: str) -> None:
        letter, *words = line.split(" ")
        if letter not in self._runs:
            raise ValueError(f"the line is not a command: {_shown(line)}")
        if letter in OF_A_SEQUENCE and int(words[0]) not in self.memory.sequences:
            raise ValueError(f"sequence {words[0]} is not live in {_shown(line)}")
        command, run = self._runs[letter]
        run(words)
        self.num_commands[command] += 1
        self._num_unchecked += 1

    def _check(self) -> None:
        self._num_unchecked = 0
        self.num_checks += 1
        check(self.memory)

    def _new_lines(self) -> list[str]:
        lines = self._log.getvalue().splitlines()
        self._log.seek(0)
        self._log.truncate()
        return lines

    def _prefix(self, num_tokens: int, names: list[str]) -> TokenChain:
        """Return a chain over the substitute tokens of the whole blocks of a hit or a pin."""
        size, parent = self.memory.block_size, 0
        if len(names) * size == num_tokens:
            for name in names:
                parent = self._blocks.number(name, parent)
        tokens = self._blocks.prefix(names[-1], size) if names else []
        if len(tokens) != num_tokens:
            raise ValueError(f"num_tokens must be {len(tokens)}, the end of the last block, got {num_tokens}")
        return self.memory.chain(tokens, Namespace())

    def _allocate(self, words: list[str]) -> None:
        seq_id, num_prompt, diverged_at, num_tokens = map(int, words[:4])
        names, num_copied = words[4:], num_tokens % self.memory.block_size
        last = names.pop() if num_copied else UNKNOWN
        chain = self._prefix(num_tokens - num_copied, names)
        chain.tokens.extend([self._blocks.numbers.get(last, 0)] * num_copied)
        # A hit leaves a token to compute; its value is arbitrary here.
        chain.tokens.append(0)
        hit = self.memory.match_prefix(chain, num_tokens)._replace(diverged_at=diverged_at)
        chain.tokens[num_tokens:] = [0] * (num_prompt - num_tokens)
        self.memory.allocate(seq_id, chain, hit)
        self.hit_tokens += hit.num_tokens

    def _free(self, words: list[str]) -> None:
        seq_id, kept, name = int(words[0]), int(words[3]), words[4] if len(words) > 4 else None
        state, size = self.memory.sequences[seq_id], self.memory.block_size
        num_full = state.num_computed // size
        if name is not None:
            tokens = state.chain.tokens
            parent = tokens[num_full * size - 1] if num_full else 0
            number = self._blocks.number(name, parent)
            tokens[num_full * size : state.num_computed] = [number] * (state.num_computed % size)
        else:
            state.is_publishing = False  # it has no published tail
        self.memory.free(seq_id, retain=kept % 2 == 1, is_sound=kept < 2)

    def _append_slots(self, words: list[str]) -> None:
        seq_id, num_tokens, lookahead, _ = map(int, words)
        self.memory.append_slots((seq_id,), num_tokens, lookahead)

    def _fork(self, words: list[str]) -> None:
        parent_id, child_id, _ = map(int, words)
        self.memory.fork(parent_id, child_id, self.memory.sequences[parent_id].chain.tokens.copy())

    def _truncate(self, words: list[str]) -> None:
        seq_id, num_tokens = map(int, words)
        self.memory.truncate(seq_id, num_tokens)
        del self.memory.sequences[seq_id].chain.tokens[num_tokens:]

    def _publish(self, words: list[str]) -> None:
        seq_id, num_computed = int(words[0]), int(words[1])
        state, size = self.memory.sequences[seq_id], self.memory.block_size
        tokens, start = state.chain.tokens, state.num_published
        if num_computed > state.num_slots:
            raise ValueError(f"num_computed must be at most {state.num_slots}, the number of slots, got {num_computed}")
        tokens += [0] * (num_computed - len(tokens))
        parent = tokens[start * size - 1] if start else 0
        for block_idx, name in enumerate(words[2:], start):
            # The chain has not encoded this block yet, so its tokens may still be set.
            parent = self._blocks.number(name, parent)
            tokens[block_idx * size : (block_idx + 1) * size] = [parent] * size
        self.memory.publish(seq_id, num_computed)

    def _adopt(self, words: list[str]) -> None:
        num_tokens, archive = int(words[0]), self.memory.archive
        num_blocks = num_tokens // self.memory.block_size
        if archive is None:
            raise ValueError("the memory of the log has no disk tier")
        fetched = [FetchedBlock(*map(int, word.split(":"))) for word in words[1 + num_blocks :]]
        archive.publish_loaded(self._prefix(num_tokens, words[1 : 1 + num_blocks]), num_blocks, fetched)

    def _pin(self, words: list[str]) -> None:
        self.memory.pin(words[0], self._prefix(int(words[1]), words[2:]))


def _shown(line: str) -> str:
    return repr(line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "...")
