"""A process in which grammars are compiled on trial, because compilation may never end, or take all memory.

`llguidance` bounds the work of each step, but a client's grammar may still find a case without a bound. So an unknown
grammar is compiled here first. A compiled grammar cannot be moved between processes: the process that uses it compiles
it again, which takes the same time.

The process imports neither torch nor the model.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

from quire.errors import UnsupportedFeature
from quire.platform.bounded.process import BoundedProcess, LimitExceeded, resident_bytes
from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import compile_grammar
from quire.text.structured.grammar_setup import GrammarSetup

# Limit of consecutive forced tokens; a grammar that forces more would only fill the context.
MAX_FORCED = 4096
READ_TOKENIZER_S = 120.0


class CompileSandbox:
    """A process that compiles grammars within limits of time and memory."""

    def __init__(self, setup: GrammarSetup, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self.num_bytes = 0
        program = "quire.text.structured.compile_sandbox:open_sandbox"
        self._process = BoundedProcess(program, pickle.dumps(setup), memory_bytes)
        reason, _ = self._send(None, READ_TOKENIZER_S)
        if reason:
            self.close()
            raise UnsupportedFeature("structured_outputs", reason)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._process.is_alive

    def compile(self, source: GrammarSource, timeout_s: float) -> str | None:
        """Return the reason why a grammar does not compile; None if it compiles.

        A grammar that exceeds a limit ends the process.
        """
        try:
            reason, self.num_bytes = self._send(source, timeout_s)
        except LimitExceeded as error:
            if error.limit == "time":
                return f"it takes longer than {timeout_s:g} s (grammar_timeout_s)"
            mib = self._memory_bytes / (1 << 20)
            return f"it takes more than {mib:g} MiB (grammar_memory_bytes), or nests too deeply"
        return reason or None

    def stop(self) -> None:
        """Abort a compilation that another thread waits for."""
        self._process.stop()

    def close(self) -> None:
        """End the process, even during a compilation."""
        self._process.close()

    def _send(self, source: GrammarSource | None, timeout_s: float) -> tuple[str, int]:
        """Return the answer of `_compile_once`; for None the error of the tokenizer, empty if it can be read."""
        reason, num_bytes = json.loads(self._process.ask(json.dumps(source).encode(), timeout_s))
        return str(reason), int(num_bytes)


def open_sandbox(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that compiles grammars on trial; runs in the process of the sandbox."""
    error, tokenizer = "", None
    try:
        tokenizer = pickle.loads(setup).open_tokenizer()
    except UnsupportedFeature as failure:
        error = failure.why

    def answer(question: bytes) -> bytes:
        source = json.loads(question)
        return json.dumps((error, 0) if source is None else _compile_once(tokenizer, GrammarSource(*source))).encode()

    return answer


def _compile_once(tokenizer: Any, source: GrammarSource) -> tuple[str, int]:
    """Return the reason why a grammar does not compile, or "", and the bytes of memory that it took."""
    num_before = resident_bytes()
    try:
        matcher = compile_grammar(tokenizer, source, is_trial=True)
    except ValueError as error:
        return str(error) or "no reason is known", 0
    num_bytes = max(0, resident_bytes() - num_before)
    num_forced = len(matcher.compute_ff_tokens())
    if num_forced > MAX_FORCED:
        return f"it forces {num_forced} tokens in a row, and {MAX_FORCED} is the most", 0
    return "", num_bytes
