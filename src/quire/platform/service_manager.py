"""Notifications to the service manager: systemd's protocol of `sd_notify`, datagrams to a socket that it names."""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

logger = logging.getLogger(__name__)

# Child processes do not inherit this variable: they are not the service.
VARIABLE: Final = "NOTIFY_SOCKET"
SEND_TIMEOUT_S: Final = 5.0


def notify(*states: str) -> None:
    """Tell the service manager states of this process, such as "READY=1"; do nothing where none asks for them."""
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_TIMEOUT_S)
            # An address in Linux's abstract namespace is written with "@" in place of the zero byte.
            sender.sendto("\n".join(states).encode(), "\0" + address[1:] if address.startswith("@") else address)
    except (OSError, AttributeError) as error:  # no Unix sockets here
        logger.warning("the service manager cannot be told %s at %r: %s", states[0], address, error)
