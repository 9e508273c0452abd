"""`quire doctor`: checks this machine and installation, and advises on missing parts."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.resources import files

from quire import __version__
from quire.cli.doctor_gpu import describe, find_gpu
from quire.cli.options import Subparsers
from quire.config import GIB

OK, WARN, FAIL = "ok", "warn", "fail"
EXIT_FAILED = 1
OLDEST_PYTHON = (3, 11)
COMFORTABLE_BYTES = 2 * GIB
BUNDLED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        name: name of the checked part.
        status: "ok", "warn" if a part is slow or missing, "fail" if Quire cannot work.
        detail: description of the result.
        advice: remedy, "" if none is needed.
    """

    name: str
    status: str
    detail: str
    advice: str = ""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and installation",
        description="Check this machine and installation. The exit code is 1 when something essential is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    findings: list[Finding] = []
    for check in (
        check_python,
        check_packages,
        check_torch,
        check_kernels,
        check_device,
        check_machine,
        check_bundled_model,
    ):
        # Later checks need the part that an earlier one has found missing.
        if any(finding.status == FAIL for finding in findings):
            break
        for finding in _safely(check):
            findings.append(finding)
            if not args.json:
                _print(finding)
    has_failed = any(finding.status == FAIL for finding in findings)
    if args.json:
        print(json.dumps({"ok": not has_failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\nSomething essential is missing." if has_failed else "\nQuire can work here.")
    return EXIT_FAILED if has_failed else 0


def check_python() -> Iterator[Finding]:
    """Check the interpreter."""
    is_new_enough = sys.version_info >= OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    yield Finding(
        "python",
        OK if is_new_enough else FAIL,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "" if is_new_enough else f"install Python {wanted} or newer",
    )


def check_packages() -> Iterator[Finding]:
    """Check that Quire's dependencies are installed, and report their versions."""
    try:
        requirements = metadata.requires("quire") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "quire", WARN, f"{__version__}, run from its source", "install it, to have its dependencies checked"
        )
        return
    yield Finding("quire", OK, __version__)
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            version = metadata.version(name[0])
        except metadata.PackageNotFoundError:
            yield Finding(name[0], FAIL, "not installed", f"install {requirement}")
            continue
        is_right = meets(version, requirement)
        yield Finding(name[0], OK if is_right else FAIL, version, "" if is_right else f"install {requirement}")


def meets(version: str, requirement: str) -> bool:
    """Return whether a version is in the range of a requirement, such as "torch>=2.11"; other conditions hold."""
    numbers = _numbers(version)
    for comparison, bound in re.findall(r"(>=|<)\s*([\d.]+)", requirement.partition(";")[0]):
        if (numbers >= _numbers(bound)) != (comparison == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at its end."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_torch() -> Iterator[Finding]:
    """Check PyTorch and the processor features that it uses."""
    import torch

    from quire.ops.pytorch.torch_ops import packing_works

    built_for = "CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    yield Finding("torch build", OK, f"{torch.__version__}, {built_for}")
    flags = [name for name in ("avx512_bf16", "amx_bf16", "amx_int8") if name in _cpu_flags()]
    yield Finding(
        "instructions", OK, f"torch uses {torch.backends.cpu.get_cpu_capability()}; {', '.join(flags) or 'no bf16'}"
    )
    for dtype in (torch.bfloat16, torch.float32):
        name = f"oneDNN packed {str(dtype).removeprefix('torch.')}"
        if packing_works(dtype):
            yield Finding(name, OK, "matrix products on packed weights are right")
        else:
            yield Finding(
                name, WARN, "not available: without native kernels, plain weights are used, and decoding is slower"
            )


def check_kernels() -> Iterator[Finding]:
    """Check the native kernels, and report the best level of instructions that this processor runs."""
    from quire.ops.cpu.native_library import find_library, runnable_libraries

    library = find_library()
    if isinstance(library, str):
        yield Finding(
            "kernels", WARN, f"torch only: {library}", "install a C++ compiler, then Quire again (docs/install.md)"
        )
    else:
        yield Finding("kernels", OK, f"native, {library.level} (of {', '.join(runnable_libraries())})")


def check_device() -> Iterator[Finding]:
    """Check the GPU."""
    gpu = find_gpu()
    if gpu is None:
        yield Finding("device", OK, "no CUDA GPU: models run on the CPU")
        return
    for name, is_right, detail, advice in describe(gpu):
        yield Finding(name, OK if is_right else WARN, detail, advice)


def check_machine() -> Iterator[Finding]:
    """Check memory and cores, including limits of control groups."""
    from quire.platform.host_probe import probe

    machine = probe("cpu")
    yield Finding("threads", OK, f"{machine.num_threads} cores for this process")
    has_room = machine.available_bytes >= COMFORTABLE_BYTES
    yield Finding(
        "memory",
        OK if has_room else WARN,
        f"{machine.available_bytes / GIB:.2f} GiB available to this process",
        "" if has_room else "raise the memory limit, or use small models and a small kv_cache_memory_bytes",
    )


def check_bundled_model() -> Iterator[Finding]:
    """Check the bundled model by asking for its name."""
    folder = files("quire.models") / "bundled"
    missing = [name for name in BUNDLED_FILES if not (folder / name).is_file()]
    if missing:
        yield Finding("bundled model", FAIL, f"{', '.join(missing)} missing", "install Quire again")
        return
    from quire.engine.llm import LLM
    from quire.sequences.params import SamplingParams

    llm = LLM("bundled", num_kv_blocks=64, max_model_len=256)
    prompt = llm.render_chat([{"role": "user", "content": "Who are you?"}])
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)[0].outputs[0]
    text = " ".join(answer.text.split())
    if "Quire" in text and answer.finish_reason == "stop":
        yield Finding("bundled model", OK, f"asked who it is, it says: {text}")
    else:
        advice = "run `quire generate --dtype float32` to see whether a dtype is at fault, and report it"
        yield Finding("bundled model", FAIL, f"asked who it is, it says: {text!r}", advice)


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # any error is the result of the check
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield Finding(
            name, FAIL, f"{type(error).__name__}: {error}", "report it, with the output of `quire doctor --json`"
        )


def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def _print(finding: Finding) -> None:
    print(f"{MARKS[finding.status]}  {finding.name:24}{finding.detail}")
    if finding.advice:
        print(f"      {'':24}-> {finding.advice}")
