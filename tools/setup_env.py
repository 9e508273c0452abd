"""Create the environment of the Makefile's commands: a virtual environment with torch and Quire.

Torch is installed first, because its build depends on the machine: the package index has the build for GPUs (several
gigabytes); a machine without a GPU gets the CPU build. An installed torch that meets the requirement is kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 11)


class SetupError(Exception):
    """A failure to create the environment; the message says what to do."""


def torch_requirement(pyproject: Path) -> str:
    """Return the requirement on torch, which only pyproject.toml states."""
    with pyproject.open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    return next(line for line in dependencies if line.startswith("torch>"))


def make_venv(venv: Path) -> Path:
    """Return the interpreter of the environment, which is created if it does not exist."""
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"creating {venv} with Python {sys.version.split()[0]}")
        if subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False).returncode != 0:
            raise SetupError(
                f"{sys.executable} cannot create a virtual environment; install its venv module (on Debian: "
                "apt install python3-venv) or give another interpreter with PYTHON=..."
            )
    if not succeeds(python, "-c", f"import sys; sys.exit(sys.version_info < {MIN_PYTHON})"):
        raise SetupError(f"{python} is older than Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]}; give another with PYTHON=...")
    if not succeeds(python, "-c", "import pip"):
        run(python, "-m", "ensurepip")
    return python


def has_torch(python: Path, requirement: str) -> bool:
    """Return whether the environment has a torch that meets the requirement."""
    # Only pip is always installed there, and it contains a parser of version ranges.
    check = (
        "import sys\nfrom importlib.metadata import version\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "sys.exit(version('torch') not in Requirement(sys.argv[1]).specifier)"
    )
    return succeeds(python, "-c", check, requirement)


def has_gpu() -> bool:
    """Return whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True, check=False).returncode == 0


def install_torch(python: Path, requirement: str) -> None:
    """Install the build of torch for this machine.

    On Linux without a GPU this is a CPU build: a wheel that pip finds without an index, else the build from uv's index
    of CPU builds, else the build of the package index.
    """
    if sys.platform != "linux" or has_gpu():
        say(f"installing {requirement} from the package index")
        run(python, "-m", "pip", "install", requirement)
        return
    say(f"no GPU found: installing a CPU build of {requirement}")
    if succeeds(python, "-m", "pip", "install", "--no-index", "--no-deps", requirement):
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        if succeeds(python, "-m", "pip", "install", "--quiet", "--target", str(target), "uv") and succeeds(
            target / "bin" / "uv", "pip", "install", "--python", str(python), "--torch-backend=cpu", requirement
        ):
            return
    say("no CPU build could be found; taking the package index's build, which works without a GPU but is large")
    run(python, "-m", "pip", "install", requirement)


def install_quire(python: Path, extra: str | None) -> None:
    """Install Quire in place, with its dependencies and optionally one of its extras."""
    say("installing quire" + (f" with its {extra!r} extra" if extra else ""))
    run(python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[{extra}]" if extra else str(ROOT))


def say(message: str) -> None:
    """Print a progress message."""
    print(f"setup: {message}", flush=True)


def run(program: Path, *arguments: str) -> None:
    """Run a command with visible output.

    Raises:
        SetupError: the command failed.
    """
    if subprocess.run([str(program), *arguments], check=False).returncode != 0:
        raise SetupError(f"this command failed: {program} {' '.join(arguments)}")


def succeeds(program: Path, *arguments: str) -> bool:
    """Run a command without output, and return whether it succeeded."""
    return subprocess.run([str(program), *arguments], capture_output=True, check=False).returncode == 0


def main() -> int:
    """Create the environment; the Makefile calls this when pyproject.toml has changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="folder; an existing environment is used as it is"
    )
    parser.add_argument("--extra", default="core", help="an extra of pyproject.toml, or 'core' for none")
    options = parser.parse_args()
    requirement = torch_requirement(ROOT / "pyproject.toml")
    try:
        python = make_venv(options.venv.absolute())
        if not has_torch(python, requirement):
            install_torch(python, requirement)
        install_quire(python, None if options.extra == "core" else options.extra)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
