"""Client of the process that compiles a model's grammars, fills their masks, and finds forced tokens.

`llguidance` holds the interpreter lock while it opens a tokenizer, two seconds for a vocabulary of 262,144, and during
parts of other calls. In the engine's process, all other requests would wait meanwhile.

A step asks two questions: for its masks, which are filled while the model runs, and for the tokens that the grammars
force after the sampled ones. Both are small; the answer has a mask of V bits for each row with a grammar.
"""

from __future__ import annotations

import json
import logging
import pickle
import struct
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from quire.errors import UnsupportedFeature, WorkerError
from quire.platform.child_process import ChildProcess
from quire.sequences.structured import GrammarSource
from quire.text.structured.grammar_server import ANSWER, APPEND, BEGIN, COMPILE, QUESTION, RELEASE, SETUP
from quire.text.structured.grammar_setup import GrammarModel, GrammarSetup
from quire.text.structured.local_grammars import HeldGrammar
from quire.text.structured.state_table import LOST, Appended, Masked, Masks, StepStart

logger = logging.getLogger(__name__)


class GrammarProcess:
    """Grammars in a separate process, which starts when it is needed, and again after it has ended.

    See `quire.text.structured.grammar_backend.GrammarBackend`.
    """

    def __init__(self, model: GrammarModel) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._is_closed = False
        self._pipes: GrammarPipes | None = None

    def start(self) -> GrammarPipes:
        """Return the pipes of the process; start it if it does not run, without waiting for its tokenizer."""
        with self._lock:
            if self._pipes is None or not self._pipes.is_alive:
                if self._is_closed:
                    raise WorkerError(LOST)
                self._pipes = GrammarPipes(self.model.setup())
            return self._pipes

    def pipes(self) -> GrammarPipes:
        """Return the pipes of the last process that was started, even if it has ended."""
        return self._pipes or self.start()

    def hold(self, source: GrammarSource, num_bytes: int) -> HeldGrammar:
        """Compile a grammar, which stays compiled while the returned object exists."""
        pipes = self.start()
        error = pipes.compile(source)
        if error is not None:
            raise ValueError(error)
        grammar = _RemoteGrammar(pipes, num_bytes)
        weakref.finalize(grammar, pipes.released.append, source).atexit = False
        return grammar

    def mask_source(self, *, overlaps: bool) -> ProcessMasks:
        """Return a source of masks."""
        return ProcessMasks(self, overlaps=overlaps)

    def close(self) -> None:
        """End the process; callers that wait for it get an error."""
        with self._lock:
            self._is_closed = True
            if self._pipes is not None:
                self._pipes.close()


class ProcessMasks:
    """A source of masks in the process; see `quire.text.structured.grammar_backend.MaskSource`."""

    def __init__(self, process: GrammarProcess, *, overlaps: bool) -> None:
        self._process = process
        self._overlaps = overlaps
        self._filled: Masks | None = None

    def begin(self, step: StepStart) -> None:
        """Fill the masks of a step, or start to fill them."""
        # The answers come from the process that was asked, even if another one has started since.
        self._pipes = self._process.pipes()
        self._pipes.begin(step)
        self._filled = None if self._overlaps else self._pipes.masks()

    def masks(self) -> Masks:
        """Wait for the masks of the last step that was begun."""
        return self._pipes.masks() if self._filled is None else self._filled

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Consume sampled tokens, and append the tokens that are forced after them."""
        return self._pipes.append(sampled)


class _RemoteGrammar(HeldGrammar):
    __slots__ = ("_pipes",)

    def __init__(self, pipes: GrammarPipes, num_bytes: int) -> None:
        super().__init__(pipes, num_bytes)
        self._pipes = pipes

    @property
    def is_held(self) -> bool:
        return self._pipes.is_alive


class GrammarPipes:
    """The process and its pipes; one thread asks the questions of steps, others compile grammars."""

    def __init__(self, setup: GrammarSetup) -> None:
        self.released: deque[GrammarSource] = deque()
        try:
            self._process = ChildProcess(
                "quire.text.structured.grammar_server:main",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise WorkerError(f"the process of the grammars does not start: {error.strerror or error}") from error
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._questions, self._steps = self._process.stdin, self._process.stdout
        self._compilations = self._process.stderr
        self._asking, self._compiling = threading.Lock(), threading.Lock()
        self._has_tokenizer = self._is_lost = False
        self._ask(SETUP, setup)

    @property
    def is_alive(self) -> bool:
        """False once the process has ended, or has closed a pipe, which it does some time before."""
        return not self._is_lost and self._process.poll() is None

    def compile(self, source: GrammarSource) -> str | None:
        """Compile and hold a grammar in the process; return the reason why it does not compile, or None."""
        with self._compiling:
            if not self._has_tokenizer:
                answer, _ = self._read(self._compilations)
                if answer["error"] is not None:
                    self.close()
                    raise UnsupportedFeature("structured_outputs", answer["error"])
                self._has_tokenizer = True
            self._ask(COMPILE, source)
            answer, _ = self._read(self._compilations)
        for warning in answer["warnings"]:
            logger.warning("%s", warning)
        error: str | None = answer["error"]
        return error

    def begin(self, step: StepStart) -> None:
        """Ask for the masks of a step; raises `WorkerError` if the process has ended, as the other methods do."""
        while self.released:
            self._ask(RELEASE, self.released.popleft())
        # Plain tuples are pickled ten times as fast.
        self._ask(BEGIN, (step.closed, step.opened, [tuple(job) for job in step.jobs]))

    def masks(self) -> Masks:
        """Wait for the masks of a step."""
        masked, masks = self._read(self._steps)
        return [Masked(*one) for one in masked], masks

    def append(self, sampled: Sequence[tuple[int, tuple[int, ...]]]) -> list[Appended]:
        """Have sampled tokens consumed, and return them with the tokens that the grammars force after them."""
        self._ask(APPEND, sampled)
        appended, _ = self._read(self._steps)
        return [Appended(tuple(token_ids), error) for token_ids, error in appended]

    def close(self) -> None:
        """End the process."""
        self._end()

    def _read(self, source: IO[bytes]) -> tuple[Any, bytearray]:
        """Read an answer: a JSON value, and masks."""
        try:
            head = source.read(ANSWER.size)
            num_bytes, num_mask_bytes = ANSWER.unpack(head)
            value, masks = json.loads(source.read(num_bytes)), bytearray(num_mask_bytes)
            if source.readinto(masks) != num_mask_bytes:  # type: ignore[attr-defined]
                raise EOFError
        except (OSError, ValueError, EOFError, struct.error) as error:
            self._is_lost = True
            raise WorkerError(LOST) from error
        return value, masks

    def _ask(self, kind: bytes, question: Any) -> None:
        content = pickle.dumps(question)
        try:
            with self._asking:
                self._questions.write(QUESTION.pack(kind, len(content)) + content)
                self._questions.flush()
        except (OSError, ValueError) as error:  # it has ended, or was closed
            self._is_lost = True
            raise WorkerError(LOST) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        with suppress(OSError):  # a question was sent only in part
            pipe.close()
