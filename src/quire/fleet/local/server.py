"""A server of `quire serve --replicas`: its port, which it keeps, and its process, which may start again."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from contextlib import suppress

from quire.errors import EXIT_USER_ERROR, QuireError
from quire.fleet.local.settings import HOST, LocalSettings
from quire.platform.child_process import ChildProcess

logger = logging.getLogger(__name__)


class LocalServer:
    """One server.

    Args:
        name: name of its process, for logs.
        settings: its options.
        program: location of `main`, or of a program in its place.

    Attributes:
        url: its address, the same for all its processes.
        process: its last process.
    """

    def __init__(self, name: str, settings: LocalSettings, program: str = f"{__name__}:main") -> None:
        self.name = name
        self._program = program
        self.process: ChildProcess | None = None
        self._settings = json.dumps([name, settings.to_json()]).encode()
        # It never listens: connections are refused while no process does.
        self._reservation = _bound_socket(0)
        self._port = self._reservation.getsockname()[1]
        self.url = f"http://{HOST}:{self._port}"

    def start(self) -> None:
        """Start a process; raises `OSError` if the system starts none."""
        with _bound_socket(self._port) as listener:
            process = ChildProcess(
                self._program,
                listener.fileno(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        self.process = process
        assert process.stdin is not None
        # Other users of this machine can read the arguments of a process, but not its input.
        with suppress(BrokenPipeError), process.stdin as settings:
            settings.write(self._settings)

    def close(self) -> None:
        """Give up the port."""
        self._reservation.close()


def _bound_socket(port: int) -> socket.socket:
    """Return a socket at a port of this machine that other sockets of this user may have too, and no other user's."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((HOST, port))
    except BaseException:
        bound.close()
        raise
    return bound


# ---- code of the process ----


def main(listener: int) -> None:
    """Serve until the parent sends a signal or the engine has died.

    Args:
        listener: descriptor of the bound socket.
    """
    from quire.server.lifecycle import serve  # its imports take seconds, and the parent needs none

    name, text = json.load(sys.stdin)
    settings = LocalSettings.from_json(text)
    settings.log.apply(name)
    try:
        code = serve(settings.engine, settings.server, socket.socket(fileno=listener))
    except QuireError as error:
        logger.error("%s", error)
        code = EXIT_USER_ERROR
    sys.exit(code)
