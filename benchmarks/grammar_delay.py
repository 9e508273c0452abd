"""The delay of other requests by an ambiguous grammar: `python -m benchmarks.grammar_delay`.

One request samples from the bundled model with a grammar whose texts can be read in ever more ways. Beside it, another
request gets 8 tokens, again and again, until the first one ends; the same beside samples without a grammar. With
`--unbounded`, grammars may take as long as they do (`quire.text.structured.grammar_budget`), for 60 seconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from benchmarks import machine
from quire import LLM, SamplingParams
from quire.text.structured import grammar_budget

AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "c" | " " e | e " "'
OTHER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_SAMPLES = (1, 16, 128)
MOST_S = 60.0


def eight_tokens(llm: LLM) -> tuple[float, float, str | None]:
    """Return the seconds until another request had its tokens, the longest step, and the error of a request."""
    engine, error, longest_s = llm.engine, None, 0.0
    engine.add_request("other", "Once upon a time", OTHER)
    started_s = time.perf_counter()
    while True:
        step_s = time.perf_counter()
        news = engine.step()
        longest_s = max(longest_s, time.perf_counter() - step_s)
        error = next((output.error for output in news if output.error is not None), error)
        if any(output.request_id == "other" and output.finished for output in news):
            return time.perf_counter() - started_s, longest_s, error


def beside(llm: LLM, num_samples: int, form: dict[str, str] | None) -> dict[str, Any]:
    """Return what 8 tokens took beside samples of one request, and how long the longest step was."""
    params = SamplingParams(n=num_samples, max_tokens=400, seed=1, structured_outputs=form, ignore_eos=form is None)  # type: ignore[arg-type]
    llm.engine.add_request("samples", "abc", params)
    begun_s, times, longest_s, error = time.perf_counter(), list[float](), 0.0, None
    llm.engine.step()
    while error is None and llm.engine.has_unfinished and time.perf_counter() - begun_s < MOST_S:
        taken_s, step_s, error = eight_tokens(llm)
        times.append(taken_s)
        longest_s = max(longest_s, step_s)
    llm.engine.abort_request("samples")
    row = {"samples": num_samples, "form": form is not None, "times_s": times, "longest_s": longest_s, "error": error}
    median_ms, most_ms = statistics.median(times) * 1e3, max(times) * 1e3
    print(
        f"n {num_samples:3}, {'grammar' if form else 'free':7}: 8 tokens {median_ms:6.0f} ms, at most {most_ms:6.0f}; "
        f"longest step {longest_s * 1e3:6.0f} ms; {len(times)} times; {error or 'no error'}",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--unbounded", action="store_true", help="grammars may take as long as they do")
    parser.add_argument("--name", default="grammar_delay", help="the name of the file under results/")
    options = parser.parse_args()
    if options.unbounded:
        grammar_budget.LIMIT_S = math.inf
    llm = LLM("bundled", num_threads=options.threads, max_model_len=1024, max_num_seqs=256)
    eight_tokens(llm)
    alone_s = statistics.median(eight_tokens(llm)[0] for _ in range(9))
    print(f"alone: 8 tokens {alone_s * 1e3:.0f} ms", flush=True)
    rows = [beside(llm, count, form) for count in NUM_SAMPLES for form in (None, {"grammar": AMBIGUOUS})]
    llm.close()
    data = {"threads": options.threads, "unbounded": options.unbounded, "alone_s": alone_s, "rows": rows}
    print(machine.save(options.name, data))


if __name__ == "__main__":
    main()
