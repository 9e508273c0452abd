"""The program of the process with a model's grammars; see `quire.text.structured.grammar_process`.

```
 stdin    <- setup, then questions: compile, release, begin a step, append
 stdout   -> answers of steps: masks, and forced tokens
 stderr   -> answers of the setup and of compilations, which another thread makes meanwhile
```

The process imports neither torch nor the model.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import struct
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

from quire.errors import UnsupportedFeature, describe
from quire.platform.bounded.process import return_freed_memory
from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_setup import CompiledGrammars, GrammarSetup
from quire.text.structured.state_table import MaskJob, StateTable, StepStart

# Kind and length of a question, and the lengths of an answer's two parts, JSON and masks.
QUESTION: Final = struct.Struct("!cQ")
ANSWER: Final = struct.Struct("!QQ")
SETUP, COMPILE, RELEASE, BEGIN, APPEND = b"s", b"c", b"r", b"b", b"a"
# Maximum time for which Python code of the compiling thread delays the thread of the steps.
SWITCH_INTERVAL_S: Final = 0.0005


def main() -> None:
    """Read the setup, then answer questions until the input ends."""
    questions, steps, compilations = sys.stdin.buffer, os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(2), "wb")
    # Output of libraries must not be read as an answer.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with suppress(BrokenPipeError, EOFError):  # the engine's process has ended
        _, setup = _read_question(questions)
        try:
            grammars = CompiledGrammars(setup)
        except UnsupportedFeature as error:
            _answer(compilations, {"error": error.why})
            return
        return_freed_memory()
        gc.freeze()
        _answer(compilations, {"error": None})
        _serve(questions, steps, compilations, grammars, setup)


def _serve(
    questions: BinaryIO, steps: BinaryIO, compilations: BinaryIO, grammars: CompiledGrammars, setup: GrammarSetup
) -> None:
    table = StateTable(grammars.find, setup.vocab_size, setup.end_token_ids)
    changes: SimpleQueue[tuple[bytes, GrammarSource]] = SimpleQueue()
    threading.Thread(target=_compile_all, args=(grammars, changes, compilations), daemon=True).start()
    while True:
        kind, question = _read_question(questions)
        if kind == BEGIN:
            closed, opened, jobs = question
            masked, masks = table.begin(StepStart(closed, opened, tuple(MaskJob(*job) for job in jobs)))
            _answer(steps, masked, masks)
        elif kind == APPEND:
            _answer(steps, table.append(question))
        else:
            changes.put((kind, question))


def _compile_all(
    grammars: CompiledGrammars, changes: SimpleQueue[tuple[bytes, GrammarSource]], compilations: BinaryIO
) -> None:
    """Compile grammars, and hold each until it was released as often as it was compiled.

    The answer to a compilation contains an error or None, and warnings to log.
    """
    references: defaultdict[GrammarSource, list[Grammar]] = defaultdict(list)
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logging.getLogger().addHandler(QueueHandler(records))
    while True:
        kind, source = changes.get()
        if kind == RELEASE:
            references[source].pop()
            if not references[source]:
                del references[source]
            continue
        error = None
        try:
            grammar = grammars.find(source)
            references[source].append(grammar)
        except Exception as failure:
            error = str(failure) or describe(failure)
        warnings = [records.get().getMessage() for _ in range(records.qsize())]
        with suppress(BrokenPipeError):
            _answer(compilations, {"error": error, "warnings": warnings})


def _read_question(source: BinaryIO) -> tuple[bytes, Any]:
    """Return the kind and the content of the next question."""
    head = source.read(QUESTION.size)
    if len(head) < QUESTION.size:
        raise EOFError
    kind, num_bytes = QUESTION.unpack(head)
    return kind, pickle.loads(source.read(num_bytes))


def _answer(sink: BinaryIO, value: Any, masks: bytearray | bytes = b"") -> None:
    content = json.dumps(value).encode()
    sink.write(ANSWER.pack(len(content), len(masks)) + content)
    sink.write(masks)
    sink.flush()
