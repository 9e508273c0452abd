"""From nothing to the first token: `python -m benchmarks.cold_start`.

Starts `quire generate` on the bundled model in a new process, and takes the time until the first text stands on its
standard output. Beside it: what the imports cost, by package.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks import machine

MARK_S = 2.5
SHOWN_PACKAGES = 12
PROMPT = "Once upon a time"
ENV = os.environ | {"HF_HUB_OFFLINE": "1"}


def first_token_s() -> float:
    """Return the seconds from the start of the process to the first character of text."""
    command = [str(Path(sys.executable).with_name("quire")), "generate", "--stream"]
    command += ["--prompt", PROMPT, "--max-tokens", "4"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout is not None
        first = process.stdout.read1(1)  # type: ignore[attr-defined]
        elapsed_s = time.perf_counter() - started
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return elapsed_s


def import_times_s(statement: str) -> dict[str, float]:
    """Return package -> seconds that its own modules took to import, the most expensive ones first."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENV)
    seconds: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        own_us, _, rest = line.removeprefix("import time:").partition("|")
        if own_us.strip().isdigit():
            module = rest.partition("|")[2].strip()
            seconds[module.partition(".")[0]] += int(own_us) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    first_token_s()  # brings files and byte code into the caches, as on any machine where it has run once
    runs = [first_token_s() for _ in range(options.runs)]
    median_s = statistics.median(runs)
    print(f"first token after {median_s:.2f} s (mark: < {MARK_S} s); {min(runs):.2f} to {max(runs):.2f}")
    imports = import_times_s("from quire import LLM; import quire.engine.llm")
    total_s = sum(imports.values())
    print(f"imports: {total_s:.2f} s with the tracer on, of which")
    dearest = dict(list(imports.items())[:SHOWN_PACKAGES])
    for package, seconds in dearest.items():
        print(f"  {package:24}{seconds:.3f} s")
    figures = {"median_s": median_s, "runs_s": runs, "mark_s": MARK_S, "imports_s": total_s, "by_package_s": dearest}
    print(machine.save("cold_start", figures))


if __name__ == "__main__":
    main()
