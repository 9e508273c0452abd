"""The timed tasks of the memory managers, and the process in which each of them runs.

Every piece of work is checked: what was found, what is held afterwards. The process reads one line `name run` at a time
and answers with one line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.engines import ANSWER
from benchmarks.memory_managers import BLOCK_SIZE, MANAGERS, Manager

VOCAB = 150000
TOKEN = 7
NewManager = Callable[[int], Manager]


class Sizes(NamedTuple):
    """The sizes of the tasks.

    Args:
        num_requests: number of requests of `num_prompt` tokens each, a multiple of 4.
        num_prompt: tokens of a prompt, a multiple of the block size.
        num_decoding: sequences of a decode step.
        num_steps: decode steps, a multiple of the block size.
        num_long: tokens of the long prompt, a multiple of the block size.
        num_repeats: long prompts hashed, and looked up.
    """

    num_requests: int = 1000
    num_prompt: int = 1024
    num_decoding: int = 256
    num_steps: int = 64
    num_long: int = 32768
    num_repeats: int = 8


def distinct(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time a request that shares nothing: all are taken in, then all are freed."""
    manager = new(sizes.num_requests * (sizes.num_prompt // BLOCK_SIZE + 1))
    manager.prepare(prompts(run, sizes.num_requests, sizes.num_prompt))
    seconds = seconds_of(lambda: _serve(manager, 0))
    return seconds / sizes.num_requests, manager.version


def again(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time a request whose prompt was served before and is still published."""
    manager = new(sizes.num_requests * (sizes.num_prompt // BLOCK_SIZE + 1))
    asked = prompts(run, sizes.num_requests, sizes.num_prompt)
    manager.prepare(asked)
    _serve(manager, 0)
    manager.prepare(asked)
    # The last block is computed again, for its logits.
    expected = sizes.num_requests * (sizes.num_prompt - BLOCK_SIZE)
    seconds = seconds_of(lambda: _serve(manager, expected))
    return seconds / sizes.num_requests, manager.version


def evicting(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time a request in a pool full of other requests' published blocks, one request after another."""
    num_kept = sizes.num_requests // 4
    manager = new(num_kept * sizes.num_prompt // BLOCK_SIZE)
    asked = prompts(run, sizes.num_requests + num_kept, sizes.num_prompt)
    earlier, later = asked[:num_kept], asked[num_kept:]
    manager.prepare(earlier)
    _serve(manager, 0)
    manager.prepare(later)
    seconds = seconds_of(manager.take_turns)
    for kept, expected in ((earlier, 0), (later[-num_kept:], num_kept * (sizes.num_prompt - BLOCK_SIZE))):
        manager.prepare(kept)
        manager.hash()
        _expect("tokens found after evictions", manager.look_up(), expected)
    return seconds / sizes.num_requests, manager.version


def decode(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time a decode step of many sequences; a block of each fills once in as many steps as it has tokens."""
    blocks_each = (sizes.num_prompt + sizes.num_steps) // BLOCK_SIZE + 1
    manager = new(sizes.num_decoding * blocks_each)
    asked = prompts(run, sizes.num_decoding, sizes.num_prompt)
    # Lengths differ by less than a block, so that sequences do not all need a new block in the same step.
    asked = [prompt[idx % BLOCK_SIZE :] for idx, prompt in enumerate(asked)]
    manager.prepare(asked)
    manager.admit()

    def steps() -> None:
        for _ in range(sizes.num_steps):
            manager.decode_step(TOKEN)

    seconds = seconds_of(steps)
    lengths = [len(prompt) + sizes.num_steps for prompt in asked]
    _expect("blocks held", manager.num_used(), sum(-(-length // BLOCK_SIZE) for length in lengths))
    manager.release()
    manager.prepare([prompt + [TOKEN] * sizes.num_steps for prompt in asked])
    manager.hash()
    num_published = sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths)
    _expect("tokens found after decoding", manager.look_up(), num_published)
    return seconds / sizes.num_steps, manager.version


def hash_long(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time the identities of all blocks of a long prompt."""
    manager = new(sizes.num_long // BLOCK_SIZE)
    manager.prepare(prompts(run, sizes.num_repeats, sizes.num_long))
    return seconds_of(manager.hash) / sizes.num_repeats, manager.version


def look_up_long(new: NewManager, sizes: Sizes, run: int) -> tuple[float, str]:
    """Time the search for a long published prefix whose blocks are hashed already."""
    manager = new(sizes.num_long // BLOCK_SIZE)
    asked = prompts(run, 1, sizes.num_long)
    manager.prepare(asked)
    _serve(manager, 0)
    manager.prepare(asked)
    manager.hash()
    found: list[int] = []
    seconds = seconds_of(lambda: found.extend(manager.look_up() for _ in range(sizes.num_repeats)))
    _expect("tokens found", min(found), sizes.num_long - BLOCK_SIZE)
    return seconds / sizes.num_repeats, manager.version


WORK: dict[str, Callable[[NewManager, Sizes, int], tuple[float, str]]] = {
    "distinct": distinct,
    "again": again,
    "evicting": evicting,
    "decode": decode,
    "hash": hash_long,
    "look-up": look_up_long,
}


def prompts(run: int, count: int, num_tokens: int) -> list[list[int]]:
    """Return random prompts, others for every run."""
    rng = random.Random(run)
    return [rng.choices(range(VOCAB), k=num_tokens) for _ in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor time of a piece of work, which other processes do not change, with garbage collection.

    What exists before is set aside, as vLLM's engine does when it has started: otherwise the collector would go
    through all that a process has imported, which is far more in one process than in the other.
    """
    gc.collect()
    gc.freeze()
    started = time.process_time()
    work()
    seconds = time.process_time() - started
    gc.unfreeze()
    return seconds


def _serve(manager: Manager, num_found: int) -> None:
    """Take in all requests and free them."""
    _expect("tokens found", manager.admit(), num_found)
    manager.release()
    _expect("blocks held after all were freed", manager.num_used(), 0)


def _expect(what: str, value: int, expected: int) -> None:
    """Make sure that a manager has done the work it is timed for."""
    if value != expected:
        raise RuntimeError(f"{what}: {value}, not {expected}")


def main() -> None:
    """Do the work whose names come in on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manager", choices=MANAGERS)
    new = MANAGERS[parser.parse_args().manager]
    started = time.perf_counter()
    new(1)
    print(f"{ANSWER}{json.dumps({'ready_s': time.perf_counter() - started})}", flush=True)
    for line in sys.stdin:
        name, run = line.split()
        seconds, version = WORK[name](new, Sizes(), int(run))
        print(f"{ANSWER}{json.dumps({'seconds': seconds, 'version': version})}", flush=True)


if __name__ == "__main__":
    main()
