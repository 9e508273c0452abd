"""Two hosts on one machine: network namespaces with a cable between them, in which a host's own name is loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

NAMES = ("node-one", "node-other")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("cable1", "cable2")
WAIT_S = 300
# Installers of Debian and Ubuntu give a host's own name the address 127.0.1.1.
SETUP = """
set -e
mount -t tmpfs none /run
mkdir /run/netns /run/hosts
for idx in 1 2; do ip netns add host$idx; done
ip link add cable1 netns host1 type veth peer name cable2 netns host2
for idx in 1 2; do
    ip -n host$idx addr add 10.77.0.$idx/24 dev cable$idx
    ip -n host$idx link set cable$idx up
    ip -n host$idx link set lo up
done
printf '127.0.0.1 localhost\\n127.0.1.1 node-one\\n10.77.0.2 node-other\\n' > /run/hosts/1
printf '127.0.0.1 localhost\\n10.77.0.1 node-one\\n127.0.1.1 node-other\\n' > /run/hosts/2
enter() {
    nsenter --net=/run/netns/host$1 unshare --mount --uts sh -c '
        hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"' - "$2" /run/hosts/$1 "${@:3}"
}
"""
RUN = """
enter 1 node-one "$@" 0 > "$FIRST" 2> "$FIRST.log" &
enter 2 node-other "$@" 1 > "$OTHER" 2> "$OTHER.log" &
wait
"""


def on_two_hosts(program: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run a Python program on both hosts; its last argument is the host's number, 0 or 1. Return what each has printed.

    The test is skipped where network namespaces are not permitted.
    """
    wanted = ("unshare", "nsenter", "ip", "mount", "hostname")
    missing = [name for name in wanted if shutil.which(name) is None]
    if missing:
        pytest.skip(f"two network namespaces need the commands {', '.join(missing)}")
    base = ["unshare", "--map-root-user", "--net", "--mount", "--uts", "--kill-child", "--fork", "bash", "-c"]
    probe = subprocess.run([*base, SETUP + "enter 1 node-one true"], capture_output=True, text=True, timeout=WAIT_S)
    if probe.returncode:
        pytest.skip(f"two network namespaces are not permitted here: {probe.stderr.strip()[:200]}")
    outputs = [folder / "first", folder / "other"]
    variables = {"FIRST": str(outputs[0]), "OTHER": str(outputs[1]), **environment}
    command = [*base, SETUP + RUN, "-", sys.executable, "-c", program, *arguments]
    subprocess.run(command, env=variables, timeout=WAIT_S, check=True)
    logs = "\n".join(path.with_suffix(".log").read_text() for path in outputs)
    assert all(path.read_text() for path in outputs), logs
    return [path.read_text() for path in outputs]
