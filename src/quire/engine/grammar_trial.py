"""A process in which grammars are tried out, because compiling one may take for ever, or all memory there is.

`llguidance` bounds the work of each step, but a client's grammar may still be made to go wrong where nobody has thought
of it, and compiled code cannot be interrupted from within its own process. So a grammar that nobody asked for before is
compiled here first: an alarm that nothing handles ends the process after the time limit, and the system refuses it more
memory than it may have. What a process compiled cannot be handed to another; the engine compiles again what was found
harmless, which takes as long as it took here.

The process knows neither torch nor the model. One line of JSON comes in for each grammar, one goes out.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from quire.errors import UnsupportedFeature, WorkerError
from quire.execution.grammars import compile_grammar, open_tokenizer
from quire.sequences.structured import GrammarSource

START_TIMEOUT_S = 120.0
# The process ends itself; this long after its time the engine does it.
GRACE_S = 2.0
# Tokens that may follow each other without a choice; what forces more would only fill the context.
MAX_FORCED = 4096
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from quire.engine.grammar_trial import main; main()"


class Trial:
    """A process that waits for grammars.

    Args:
        tokenizer: the text of a `tokenizer.json`.
        vocab_size: V of the logits.
        end_token_ids: of the model.
        memory_bytes: that compiling may add to what the process takes at rest.

    Raises:
        UnsupportedFeature: `llguidance` cannot read the tokenizer.
        WorkerError: the process does not start.

    Attributes:
        num_bytes: of memory that the last grammar that compiled took.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_token_ids: tuple[int, ...], memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self.num_bytes = 0
        # Signals of the terminal are the parent's affair.
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # An engine that nobody closes takes its process with it all the same.
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._ask([tokenizer, vocab_size, end_token_ids, memory_bytes], START_TIMEOUT_S)
        if answer is None:
            self.close()
            raise WorkerError("the process that compiles grammars does not start")
        if answer[0]:
            self.close()
            raise UnsupportedFeature("structured_outputs", answer[0])

    @property
    def is_alive(self) -> bool:
        """False once a grammar, or somebody else, has ended the process."""
        return self._process.poll() is None

    def compile(self, source: GrammarSource, timeout_s: float) -> str | None:
        """Return why a grammar does not compile, None where it does.

        The process does not outlive a grammar that goes over a limit.
        """
        answer = self._ask([*source, timeout_s], timeout_s + GRACE_S)
        if answer is not None:
            reason, self.num_bytes = answer
            return reason or None
        code = self._process.poll()
        self.close()
        if code is None or code == -signal.SIGALRM:
            return f"it takes longer than {timeout_s:g} s (grammar_timeout_s)"
        mib = self._memory_bytes / (1 << 20)
        return f"it takes more than {mib:g} MiB (grammar_memory_bytes), or nests too deeply"

    def close(self) -> None:
        """End the process, in whatever state it is."""
        self._end()

    def _ask(self, question: list[Any], timeout_s: float) -> tuple[str, int] | None:
        """Write a line and return what comes back, see `_answer`; None where nothing comes in time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        except OSError:
            self._process.wait()
            return None
        # The answer is one short line, written at once.
        if not select.select([stdout], [], [], timeout_s)[0]:
            return None
        line = stdout.readline()
        if not line:
            self._process.wait()
            return None
        reason, num_bytes = json.loads(line)
        return str(reason), int(num_bytes)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # What was still to be written goes nowhere.
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def main() -> None:
    """Serve as the process: one line in, one line out, until there are no more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    lines = iter(sys.stdin.readline, "")
    tokenizer_text, vocab_size, end_token_ids, memory_bytes = json.loads(next(lines))
    try:
        tokenizer = open_tokenizer(tokenizer_text, vocab_size, end_token_ids)
    except UnsupportedFeature as error:
        _answer(sys.stdout, str(error))
        return
    del tokenizer_text
    _limit_memory(memory_bytes)
    _answer(sys.stdout, "")
    for line in lines:
        *source, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reason, num_bytes = _try(tokenizer, GrammarSource(*source))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(sys.stdout, reason, num_bytes)


def _try(tokenizer: Any, source: GrammarSource) -> tuple[str, int]:
    """Return why a grammar does not compile, nothing where it does; and the bytes of memory that it took."""
    num_before = _resident_bytes()
    try:
        matcher = compile_grammar(tokenizer, source)
    except ValueError as error:
        return str(error) or "no reason is known", 0
    num_bytes = max(0, _resident_bytes() - num_before)
    num_forced = len(matcher.compute_ff_tokens())
    if num_forced > MAX_FORCED:
        return f"it forces {num_forced} tokens in a row, and {MAX_FORCED} is the most", 0
    return "", num_bytes


def _resident_bytes() -> int:
    """Return the memory that the process has, what earlier grammars left behind given back."""
    with suppress(OSError, AttributeError):  # where the C library has no such call, less is found to have grown
        ctypes.CDLL(None).malloc_trim(0)
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(memory_bytes: int) -> None:
    """Have the system refuse this process more than so many bytes beyond what it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(out: TextIO, reason: str, num_bytes: int = 0) -> None:
    """Write why something failed, nothing where it did not, and the bytes of memory that it took."""
    out.write(json.dumps([reason, num_bytes]) + "\n")
    out.flush()
