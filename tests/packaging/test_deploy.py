"""The files of deploy/ name what exists: commands, options, files of the checkout."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from quire.cli.main import parse_args
from quire.config import option_sections

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with its arguments in one line."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    parts = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, arguments) for name, _, arguments in parts]


def test_the_dockerfile_has_known_instructions_and_its_sources_exist() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    stages = {arguments.split(" AS ")[1] for name, arguments in found if name == "FROM" and " AS " in arguments}
    for name, arguments in found:
        if name == "COPY":
            options = [word for word in shlex.split(arguments) if word.startswith("--")]
            *sources, _ = (word for word in shlex.split(arguments) if not word.startswith("--"))
            if options:
                assert options[0].removeprefix("--from=") in stages
            else:
                assert [source for source in sources if not (ROOT / source).exists()] == []
    # All that a build of the package reads.
    copied = " ".join(arguments for name, arguments in found if name == "COPY")
    assert all(word in copied for word in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src"))


def test_the_containers_command_is_understood() -> None:
    found = dict(instructions())
    entry, arguments = json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])
    args = parse_args([*entry[1:], *arguments])
    assert (entry[0], args.command, args.host, args.model) == ("quire", "serve", "0.0.0.0", "bundled")
    assert f":{args.port}/health" in found["HEALTHCHECK"]
    assert found["EXPOSE"] == str(args.port)


def test_the_services_options_are_understood() -> None:
    unit = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(command)
    assert words[0].endswith("/quire")
    assert words[-1] == "/etc/quire/serve.toml"
    args = parse_args([*words[1:-1], str(DEPLOY / "serve.toml")])
    assert (args.command, args.model, args.port) == ("serve", "bundled", 8000)
    # Those that are commented out, too.
    text = (DEPLOY / "serve.toml").read_text(encoding="utf-8")
    for key in re.findall(r"^#? ?([\w-]+) = ", text, re.MULTILINE):
        assert hasattr(args, key.replace("-", "_")) or key.replace("-", "_") in option_sections()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_systemd_takes_the_unit(has_gpu: bool, tmp_path: Path) -> None:
    unit = tmp_path / "quire.service"
    text = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/quire/bin/quire", "/bin/true"), encoding="utf-8")
    if has_gpu:
        drop_in = tmp_path / "quire.service.d" / "gpu.conf"
        drop_in.parent.mkdir()
        shutil.copy(DEPLOY / "quire-gpu.conf", drop_in)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_drop_in_for_gpus_takes_back_what_hides_them() -> None:
    unit = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    drop_in = (DEPLOY / "quire-gpu.conf").read_text(encoding="utf-8")
    assert "\nPrivateDevices=yes\n" in unit
    assert "\nPrivateDevices=no\n" in drop_in
    (devices,) = re.findall(r"^DeviceAllow=char-(\S+) rw$", drop_in, re.MULTILINE)
    # Names of the driver's groups of devices in /proc/devices.
    assert all(
        fnmatch(name, devices) for name in ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps")
    )
    assert "quire-gpu.conf" in unit
    assert "deploy/quire-gpu.conf" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_the_service_has_started_when_it_serves() -> None:
    unit = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    assert "\nType=notify\n" in unit
    # Systemd's default of 90 s is less than large models take.
    assert "\nTimeoutStartSec=30min\n" in unit
