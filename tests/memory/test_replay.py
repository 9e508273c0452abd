"""A recording replays to the same ids, and damage to it is found at its line."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest

from quire.errors import LogError
from quire.memory import (
    ChunkedLocal,
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    RecurrentState,
    SlidingWindow,
    Verdict,
)
from quire.memory.invariants import snapshot
from quire.memory.recording.recorder import COUNT_EVERY, TITLE, VERSION, MemoryRecorder
from quire.memory.recording.replay import Report, replay
from quire.memory.recording.settings import MemorySettings
from quire.scheduling import Scheduler
from quire.sequences import Request, SamplingParams
from tests.memory.recorded_walk import SIZE, walk
from tests.scheduling.simulated_executor import SimulatedExecutor

FULL = FullAttention(block_size=SIZE)
WINDOW = SlidingWindow(block_size=SIZE, window=7)
CHUNKED = ChunkedLocal(block_size=SIZE, chunk=8, num_layers=3)
STATE = RecurrentState(block_size=SIZE, layer_bytes=40)
GROUPS = [(FULL,), (WINDOW,), (CHUNKED,), (FULL, WINDOW), (CHUNKED, FULL, WINDOW), (STATE,), (WINDOW, FULL, STATE)]


def open_memory(settings: MemorySettings, key: bytes = b"secret") -> tuple[KVCacheManager, io.StringIO]:
    memory, log = settings.build(key), io.StringIO()
    MemoryRecorder(memory, settings, log)
    return memory, log


def play(log: str | list[str], check_every: int = 1) -> Report:
    return replay(io.StringIO(log) if isinstance(log, str) else log, check_every)


def ids_of(manager: KVCacheManager) -> object:
    """Return all block ids of the state, in their order: a snapshot without tokens, names and digests."""
    state: Any = snapshot(manager)
    sequences, pools, slabs, (_, nodes, _), pins, copies = state
    return (
        [(seq_id, *rest) for seq_id, _, *rest in sequences],
        pools,
        [(parent, first, blocks) for parent, first, _, _, blocks, *_ in nodes],
        slabs,
        sorted(tables for _, tables in pins),
        copies,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("specs", GROUPS, ids=str)
@pytest.mark.parametrize("eviction", ["lru", "slru"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4, 5))])
def test_a_random_walk_runs_again_to_the_same_state(
    specs: tuple[KVCacheSpec, ...], eviction: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[KVCacheManager] = []
    build = MemorySettings.build

    def keep(self: MemorySettings, key: bytes = b"") -> KVCacheManager:
        built.append(build(self, key))
        return built[-1]

    monkeypatch.setattr(MemorySettings, "build", keep)
    num_bytes = 14 * sum(spec.bytes_per_block for spec in specs)
    settings = MemorySettings(
        specs=specs,
        num_bytes=num_bytes,
        eviction=eviction,
        pin_limit=3,
        retention_limit=seed,
        enable_prefix_caching=seed > 0,
        host_bytes=num_bytes if seed % 2 == 0 else 0,
        snapshot_interval=2 * SIZE,
        has_disk=seed == 2,
    )
    memory, log = open_memory(settings)
    walk(memory, random.Random(seed), 1200)
    memory.take_ops()
    report = play(log.getvalue())
    assert report.fault is None
    assert report.usage == memory.usage()
    assert report.num_checks == sum(report.num_commands.values()) > COUNT_EVERY
    recorded, replayed = built
    assert ids_of(replayed) == ids_of(recorded)
    if seed > 0:
        verbs = {"allocate", "append_slots", "append_slot_to_all", "fork", "truncate", "publish", "free"}
        verbs |= {"reset_prefix_cache"}
        assert report.num_commands.keys() >= verbs | {"take_table_deltas", "take_ops"}
        assert report.usage.num_copies > 0
    if seed % 2 == 0:
        assert report.num_commands.keys() >= {"swap_out", "swap_in"}
        assert report.usage.host is not None
        assert report.usage.host.num_swap_ins > 0
    assert (report.num_commands.get("publish_loaded", 0) > 0) == (seed == 2)


@pytest.mark.parametrize(
    "specs", [pytest.param(specs, marks=[] if specs is GROUPS[-1] else pytest.mark.slow) for specs in GROUPS], ids=str
)
def test_a_scheduler_under_pressure_is_recorded(specs: tuple[KVCacheSpec, ...]) -> None:
    num_bytes = 17 * sum(spec.bytes_per_block for spec in specs)
    settings = MemorySettings(specs=specs, num_bytes=num_bytes, watermark=1)
    memory, log = open_memory(settings)
    scheduler = Scheduler(memory, max_num_seqs=8, max_num_batched_tokens=24)
    executor = SimulatedExecutor(SIZE, 13, specs)
    rng = random.Random(3)
    for i in range(40):
        prompt = [7] * rng.randrange(1, 20) + [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
        params = SamplingParams(n=rng.choice((1, 1, 3)), max_tokens=12)
        scheduler.add(Request(f"{i}", prompt, params, len(prompt) + 12, frozenset(), i, seed=i))
    tick = 0
    while scheduler.has_unfinished:
        plan = scheduler.plan(tick)
        scheduler.update_from_results(plan.items, executor.execute(plan).items)
        tick += 1
    report = play(log.getvalue())
    assert report.fault is None
    assert report.usage == memory.usage()
    assert report.hit_tokens == scheduler.stats.prefix_hits + scheduler.stats.resumed_hits > 0
    if FULL in specs:
        assert scheduler.stats.num_preemptions > 0
    assert report.num_commands["fork"] > 0


def test_the_log_says_nothing_of_the_tokens() -> None:
    logs = []
    for key, tokens in ((b"one", list(range(700, 740))), (b"one", list(range(700, 740))), (b"two", [*range(700, 740)])):
        memory, log = open_memory(MemorySettings(specs=(FULL,), num_blocks=20), key)
        chain = memory.chain(tokens, Namespace(cache_salt="tenant"))
        memory.allocate(0, chain, memory.match_prefix(chain))
        memory.append_slots((0,), 40)
        memory.publish(0, 40)
        logs.append(log.getvalue())
    assert "tenant" not in logs[0]
    assert not re.search(r"\b7[0-3]\d\b", logs[0])
    assert logs[0] == logs[1]
    names = [set(re.findall(r"\b[0-9a-f]{16}\b", log)) for log in logs]
    assert len(names[0]) == 10
    assert not names[0] & names[2], "without the key, equal tokens cannot be recognised"


# ---- damage ----


@pytest.fixture(scope="module")
def sound() -> list[str]:
    memory, log = open_memory(MemorySettings(specs=(FULL, WINDOW), num_blocks=14))
    walk(memory, random.Random(12), 500)
    for seq_id in sorted(memory.sequences):
        memory.free(seq_id)
    lines = log.getvalue().splitlines(keepends=True)
    assert play(lines).fault is None
    return lines


def last_of(lines: list[str], letter: str, pattern: str = "") -> int:
    return max(i for i, line in enumerate(lines) if line.startswith(letter) and re.search(pattern, line))


def spoilt(line: str) -> str:
    """Return a line whose last word ends differently."""
    return re.sub(r"\w(\W*)$", lambda end: ("1" if end[0][0] != "1" else "2") + end[1], line)


@pytest.mark.parametrize("letter", "askfd=")
def test_a_changed_line_is_named(sound: list[str], letter: str) -> None:
    # The name of a tail that is never met again may be any; so may the hint, where nothing is retained.
    idx = last_of(sound, letter, r"[ ,]\d{1,4}\n")
    words = sound[idx].split(" ")
    place = 3 if letter == "f" else -1
    words[place] = spoilt(words[place])
    fault = play([*sound[:idx], " ".join(words), *sound[idx + 1 :]]).fault
    assert fault is not None
    assert fault.line == idx + 1


def test_a_changed_name_is_found_where_the_block_is_met_again(sound: list[str]) -> None:
    # A hit on whole blocks, and who published the last of them.
    met = last_of(sound, "a", r"^a \d+ \d+ \d+ (4|8|12) \w+\n")
    name = sound[met].split()[5]
    idx = last_of(sound[:met], "p", name)
    fault = play([*sound[:idx], sound[idx].replace(name, spoilt(name)), *sound[idx + 1 :]]).fault
    assert fault is not None
    assert idx + 1 < fault.line <= met + COUNT_EVERY


def test_a_missing_line_is_found(sound: list[str]) -> None:
    for letter in "aksfd=":
        idx = last_of(sound, letter)
        fault = play([*sound[:idx], *sound[idx + 1 :]]).fault
        if letter == "=" and idx == len(sound) - 1:
            assert fault is None, "a log may end between a command and its counts"
        else:
            assert fault is not None, letter
            assert fault.line > idx


def test_a_free_that_is_missing_is_found_where_its_blocks_are(sound: list[str]) -> None:
    idx = next(i for i, line in enumerate(sound) if line.startswith("f"))
    fault = play([*sound[:idx], *sound[idx + 1 :]]).fault
    assert fault is not None
    assert idx < fault.line
    assert "invariant M10: the log says" in fault.detail


def test_lines_that_are_no_commands_are_named(sound: list[str]) -> None:
    for rubbish in ("z 1\n", "\n", "s\n", "s x 1 0 1\n", "f 999 1 1\n", "a 999 4 0123456789abcdef\n", "\ufffd\ufffd\n"):
        fault = play([*sound[:9], rubbish, *sound[9:]]).fault
        assert fault is not None
        assert fault.line == 10


def test_a_command_that_memory_could_never_have_granted_is_named(sound: list[str]) -> None:
    idx = max(i for i, line in enumerate(sound) if line.startswith("s") and sound[i + 1].startswith("p"))
    words = sound[idx].split()
    words[2] = "1000000000000"
    fault = play([*sound[:idx], " ".join(words) + "\n", *sound[idx + 1 :]]).fault
    assert fault is not None
    assert fault.line == idx + 1


def test_a_broken_invariant_is_named(sound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    free = KVCacheManager.free

    def forgetful(self: KVCacheManager, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        self.groups[0].pool.num_used += 1
        free(self, seq_id, retain=retain, is_sound=is_sound)

    monkeypatch.setattr(KVCacheManager, "free", forgetful)
    idx = next(i for i, line in enumerate(sound) if line.startswith("f"))
    fault = play(sound[: idx + 1]).fault
    assert fault is not None
    assert (fault.line, fault.detail[:13]) == (idx + 1, "invariant M1:")


@pytest.mark.parametrize(
    "step", [37, pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_a_last_line_that_is_cut_off_is_not_run(sound: list[str], step: int) -> None:
    text = "".join(sound)
    whole = play(text)
    last = len(sound[-1])
    for length in sorted({*range(0, len(sound[-2]) + last, step), last - 1, last, last + 1}):
        report = play(text[: len(text) - length])
        assert report.fault is None
        assert report.is_truncated == (not text[: len(text) - length].endswith("\n"))
    assert not whole.is_truncated


def test_checks_are_as_many_as_asked_for(sound: list[str]) -> None:
    num_commands = sum(play(sound).num_commands.values())
    assert play(sound).num_checks == num_commands
    assert play(sound, 7).num_checks == -(-num_commands // 7)
    assert play(sound, 10**9).num_checks == 1


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("", "does not start with 'quire memory log'"),
        ("\x7fELF\ufffd\n", "does not start with"),
        (f"{TITLE} {VERSION + 1} {{}}\n", f"version {VERSION + 1}, and only version {VERSION}"),
        (f"{TITLE} {VERSION} {{}}\n", "damaged"),
        (f"{TITLE} {VERSION} []\n", "damaged"),
        (f"{TITLE} {VERSION}\n", "damaged"),
        (f'{TITLE} {VERSION} {{"specs": [{{"kind": "none"}}]}}\n', "damaged"),
        (f'{TITLE} {VERSION} {{"specs": [], "num_blocks": 4}}\n', "damaged"),
        (f'{TITLE} {VERSION} {{"specs": [{{"kind": "full", "block_size": 4}}], "eviction": "x"}}\n', "damaged"),
    ],
)
def test_what_is_no_log_is_refused(header: str, words: str) -> None:
    with pytest.raises(LogError, match=re.escape(words)):
        play(header)


def test_settings_survive_being_written() -> None:
    settings = MemorySettings(
        specs=(FULL, WINDOW, CHUNKED),
        num_bytes=1 << 20,
        watermark=3,
        eviction="fifo",
        pin_limit=2,
        retention_limit=1,
        host_bytes=9,
    )
    assert MemorySettings.from_json(settings.to_json()) == settings


def test_a_refused_command_is_recorded_as_such() -> None:
    memory, log = open_memory(MemorySettings(specs=(FULL,), num_blocks=2))
    chain = memory.chain(list(range(20)), Namespace())
    hit = memory.match_prefix(chain)
    assert memory.capacity.can_allocate(20, hit).verdict is Verdict.NEVER
    memory.allocate(0, chain, hit)
    assert not memory.append_slots((0,), 20)
    assert log.getvalue().splitlines()[1:] == ["a 0 20 0 0", "s 0 20 0 0"]
    assert play(log.getvalue()).fault is None


def test_a_log_of_a_memory_without_a_disk_has_no_loads() -> None:
    memory, log = open_memory(MemorySettings(specs=(FULL,), num_blocks=4))
    assert memory.archive is None
    report = play(log.getvalue() + f"l {SIZE} name 0:0:7\n")
    assert report.fault is not None
    assert "the memory of the log has no disk tier" in report.fault.detail
