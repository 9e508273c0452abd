"""Child processes: each runs a Python function, and ends with the process that started it, however that ends.

The parent holds the writing end of a pipe, the lifeline, for as long as it lives. On Linux the child asks the system
for SIGKILL when that end closes, which also works while the child computes in compiled code; elsewhere a thread of the
child waits for it.

`PR_SET_PDEATHSIG` would not do: its signal comes when the *thread* that started the child ends, and any thread of a
program may start bounded processes, grammars and ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

from quire.platform import service_manager

BOOT: Final = (
    "import json, sys; program, arguments, lifeline, sys.path[:] = json.loads(sys.argv[1]); "
    "from quire.platform.child_process import run; run(program, arguments, lifeline)"
)
# Lifelines need descriptors that are inherited by their number, which Windows does not have.
HAS_LIFELINE: Final = os.name == "posix"


class ChildProcess(subprocess.Popen[bytes]):
    """A process that runs a function of an importable module, with the module search path of this process.

    The system kills it when this process ends, or when this object is collected. It runs in a session of its own, since
    only this process handles signals of the terminal.

    Args:
        program: location of the function as "module:function".
        arguments: arguments of the function, as JSON values.
        pass_fds: descriptors that the process inherits, besides the standard ones.
        options: further options of `subprocess.Popen`, such as `stdin`.

    Raises:
        OSError: the system starts no more processes, or has no descriptor for the lifeline.
    """

    _lifeline = -1

    def __init__(self, program: str, *arguments: Any, pass_fds: Sequence[int] = (), **options: Any) -> None:
        environment = {name: value for name, value in os.environ.items() if name != service_manager.VARIABLE}
        theirs, ours = os.pipe() if HAS_LIFELINE else (-1, -1)
        description = json.dumps([program, arguments, theirs, [str(folder) for folder in sys.path]])
        try:
            super().__init__(
                [sys.executable, "-c", BOOT, description],
                pass_fds=(theirs, *pass_fds) if HAS_LIFELINE else (),
                start_new_session=True,
                env=environment,
                **options,
            )
        except BaseException:
            _close(ours)
            raise
        finally:
            _close(theirs)
        self._lifeline = ours
        _children.add(self)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        code = super().poll()
        if code is not None:
            self.release()
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code; see `subprocess.Popen.wait`."""
        code = super().wait(timeout)
        self.release()
        return code

    def release(self) -> None:
        """Close the lifeline, which kills the process if it still runs."""
        lifeline, self._lifeline = self._lifeline, -1
        _close(lifeline)

    def __del__(self) -> None:
        """End the process if it still runs, since nothing refers to it."""
        self.release()
        super().__del__()


_children: Final[weakref.WeakSet[ChildProcess]] = weakref.WeakSet()


def _release_after_fork() -> None:
    """Close the lifelines in a process that was forked from this one, which may outlive it."""
    for child in tuple(_children):
        child.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_after_fork)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


# ---- code of the child ----


def run(program: str, arguments: Sequence[Any], lifeline: int) -> None:
    """Run a function at a location "module:function", and end with the parent."""
    if lifeline >= 0:
        os.set_inheritable(lifeline, False)
        if not _is_killed_by(lifeline):
            threading.Thread(target=_wait_for_end, args=(lifeline,), name="quire-lifeline", daemon=True).start()
    function_at(program)(*arguments)


def function_at(location: str) -> Any:
    """Return the function at a location "module:function"."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_killed_by(lifeline: int) -> bool:
    """Have the system kill this process when the other end of a pipe closes; return whether it will."""
    try:
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):  # not on Linux
        return False
    # The parent may have ended before.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):
        _end()
    return True


def _wait_for_end(lifeline: int) -> NoReturn:
    with suppress(OSError):
        os.read(lifeline, 1)
    _end()


def _end() -> NoReturn:
    os._exit(128 + signal.SIGTERM)
