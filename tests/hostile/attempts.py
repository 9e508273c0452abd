"""Loads the checkpoints that are named on standard input, each in a process of its own with limits.

`python -m tests.hostile.attempts`: one line in with the folder, one line out with what came of it. What is imported is
imported once: each attempt is a fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

MEMORY_BYTES = 3 << 30
TIMEOUT_S = 30
TEXTS = ("Hello, world! It's 2024; 12345 <|end|> \u4f60\u597d e\u0301 \U0001f600", "a" * 3000, "one two three " * 200)


def plan(folder: str) -> None:
    """Plan the memory of a checkpoint's model, from its configuration alone."""
    from quire.config import EngineConfig
    from quire.errors import QuireError
    from quire.models.capacity.planner import plan_memory
    from quire.models.capacity.report import PlanRequest

    config = EngineConfig.from_options(model=folder)
    with suppress(QuireError):
        plan_memory(PlanRequest(config=config, memory_bytes=1 << 34, weights_bytes=None, lengths=()))


def attempt(folder: str) -> str:
    """Load a checkpoint and use it; return what happened, and raise nothing that a user should not see."""
    from quire import LLM, SamplingParams
    from quire.errors import QuireError

    plan(folder)
    try:
        llm = LLM(folder, num_kv_blocks=64, num_threads=1, max_model_len=256)
    except QuireError as error:
        return f"refused: {type(error).__name__}: {error}"
    params = SamplingParams(max_tokens=3, logprobs=1, temperature=0.0, bad_words=("a b",))
    happened = ["loaded"]
    for prompt in (*TEXTS, {"prompt_token_ids": [5, 6, 7]}):
        try:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            happened.append(str(output.error or "generated"))
        except QuireError as error:
            happened.append(type(error).__name__)
    try:
        llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)
        happened.append("chatted")
    except QuireError as error:
        happened.append(type(error).__name__)
    llm.close()
    return "; ".join(happened)


def in_a_process(folder: str) -> dict[str, object]:
    """Fork, attempt, and return what came of it with the seconds and bytes that it took."""
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(read)
        signal.alarm(TIMEOUT_S)
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            said = attempt(folder)
        except BaseException:
            said = "untyped: " + traceback.format_exc()[-1500:]
        os.write(write, said.encode("utf-8", "replace")[:4000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        said = "timeout" if number == signal.SIGALRM else f"ended by signal {number}"
    return {"said": said, "seconds": time.monotonic() - began, "bytes": usage.ru_maxrss * 1024}


def main() -> None:
    """Serve attempts until there are no more."""
    import quire.engine.llm
    import quire.models.capacity.planner
    import quire.ops.cpu.native_ops  # noqa: F401
    from quire.text.chat.rendering import Renderer

    # Bombs in templates shall not take the tests as long as they may take a server.
    defaults = Renderer.__init__.__kwdefaults__
    assert defaults is not None
    defaults["timeout_s"] = 1.0
    # The library's panics and warnings of models go nowhere.
    answers = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for line in sys.stdin:
        answers.write(json.dumps(in_a_process(line.rstrip("\n"))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
