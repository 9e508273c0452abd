"""`quire` with small servers behind `serve --replicas`, and delays of restarts that are a twentieth."""

from __future__ import annotations

import sys

from quire.cli.main import main
from quire.fleet.local import fleet, restarts
from quire.fleet.local.server import LocalServer
from quire.fleet.local.settings import LocalSettings


class SmallServer(LocalServer):
    """A server whose process has no model."""

    def __init__(self, name: str, settings: LocalSettings) -> None:
        super().__init__(name, settings, "tests.serving.small_server:serve")


if __name__ == "__main__":
    vars(fleet)["LocalServer"] = SmallServer
    restarts.FIRST_DELAY_S, restarts.LONGEST_DELAY_S = 0.05, 1.5
    sys.exit(main(sys.argv[1:]))
