"""Public JSON schemas as answers: `python -m benchmarks.json_schema_suites --suite FOLDER --maskbench FOLDER`.

The folders are checkouts of JSON-Schema-Test-Suite (json-schema-org) and of jsonschemabench (guidance-ai); neither is
part of this project. Each schema is compiled, or refused for a keyword. Under a compiled one, random outputs are drawn
and checked with the package `jsonschema`, and the instances of the suite are checked: an invalid one must not be an
output. A process does this within limits of memory, and of time for each schema; where one goes beyond them, the next
process takes over.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from quire.sequences.structured import GrammarSource
from tests.schemas import walks
from tests.schemas.refusals import keyword_of

# By folder of the test suite: the URI of the draft, which its older schemas do not name.
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
SECONDS, MEMORY_BYTES = 20, 4 << 30
MAX_BYTES = 4000
TOO_EXPENSIVE = "(more than the limits of time or memory)"


class Case(NamedTuple):
    """A schema of a suite.

    Args:
        name: name of the schema.
        schema: the schema.
        instances: instances, each with its validity.
    """

    name: str
    schema: Any
    instances: Sequence[tuple[Any, bool]]


def test_suite_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of JSON-Schema-Test-Suite, without those of optional behaviour."""
    for draft, uri in DRAFTS.items():
        for path in sorted((folder / "tests" / draft).glob("*.json")):
            for idx, group in enumerate(json.loads(path.read_text(encoding="utf-8"))):
                schema = group["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    schema = {"$schema": uri, **schema}
                instances = [(test["data"], test["valid"]) for test in group["tests"]]
                yield Case(f"{draft}/{path.stem}[{idx}]", schema, instances)


def maskbench_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of MaskBench."""
    for path in sorted((folder / "maskbench" / "data").glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        yield Case(path.stem, case["schema"], [(test["data"], test["valid"]) for test in case["tests"]])


def check(case: Case, num_walks: int, is_closed: bool) -> dict[str, Any]:
    """Return the counts of one schema, and what is wrong."""
    schema = json.dumps(case.schema)
    try:
        matcher = walks.compiled(GrammarSource("json", schema, is_closed=is_closed))
    except ValueError as error:
        return {"refused": keyword_of(str(error)), "reason": str(error)}
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    rng = Random(case.name)
    can_check = agrees(case)
    for _ in range(num_walks):
        text = walks.walk(matcher, rng, MAX_BYTES)
        counts["cut outputs" if text is None else "complete outputs" if can_check else "unchecked outputs"] += 1
        if text is not None and can_check and not walks.is_valid(text, case.schema):
            counts["invalid outputs"] += 1
            wrong.append(text)
    for instance, is_valid in case.instances:
        text = json.dumps(instance, ensure_ascii=False)
        is_written = walks.writes(matcher, text)
        if not is_valid and is_written:
            # Some instances of MaskBench are labelled as invalid, and are not after the package.
            is_sure = not (can_check and walks.is_valid(text, case.schema))
            counts["invalid instances that are outputs" if is_sure else "instances whose label is wrong"] += 1
            wrong.append(text)
        counts[f"{'valid' if is_valid else 'invalid'} instances"] += 1
        counts["valid instances that are outputs"] += is_valid and is_written
    return {"counts": dict(counts), "wrong": wrong}


def agrees(case: Case) -> bool:
    """Return whether the package `jsonschema` reads a schema, and finds all valid instances valid."""
    try:
        return all(walks.is_valid(json.dumps(one), case.schema) for one, is_valid in case.instances if is_valid)
    except Exception:  # what the package raises is not one type: of expressions, references, numbers
        return False


def in_processes(cases: Sequence[Case], num_walks: int, is_closed: bool) -> Iterator[dict[str, Any]]:
    """Yield the result of `check` for each case, or that it took too much: that ends the process of the check."""
    context = multiprocessing.get_context("fork")
    done = 0
    while done < len(cases):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(sender, cases[done:], num_walks, is_closed))
        worker.start()
        sender.close()
        try:
            for _ in range(len(cases) - done):
                yield receiver.recv()
                done += 1
        except EOFError:
            yield {"refused": TOO_EXPENSIVE, "reason": ""}
            done += 1
        worker.join()
        receiver.close()


def _work(sender: Connection, cases: Sequence[Case], num_walks: int, is_closed: bool) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for case in cases:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, resource.RLIM_INFINITY))
        sender.send(check(case, num_walks, is_closed))


def run(name: str, cases: Sequence[Case], num_walks: int, is_closed: bool) -> dict[str, Any]:
    """Return the counts of a suite, its refusals by keyword, and its errors."""
    counts: Counter[str] = Counter(schemas=len(cases))
    refusals: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for case, result in zip(cases, in_processes(cases, num_walks, is_closed), strict=True):
        if "refused" in result:
            refusals[result["refused"]] += 1
            reasons[case.name] = result["reason"]
            continue
        counts.update(compiled=1, **result["counts"])
        if result["wrong"]:
            wrong[case.name] = result["wrong"]
    title = f"{name}{', closed' if is_closed else ''}"
    print(f"\n{title}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    for keyword, count in refusals.most_common():
        print(f"    {count:5} {keyword}")
    for one, texts in wrong.items():
        print(f"    wrong: {one}: {texts[0][:200]}")
    return {"counts": counts, "refusals": dict(refusals.most_common()), "wrong": wrong, "reasons": reasons}


def main() -> None:
    """Run the suites whose folders are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, help="checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--maskbench", type=Path, help="checkout of jsonschemabench")
    parser.add_argument("--walks", type=int, default=4, help="random outputs of each schema")
    parser.add_argument("--every", type=int, default=1, help="take each n-th schema of MaskBench")
    parser.add_argument("--closed", action="store_true", help="leave further properties out, as response_format does")
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.suite is not None:
        cases = [*test_suite_cases(args.suite)]
        found["JSON-Schema-Test-Suite"] = run("JSON-Schema-Test-Suite", cases, args.walks, args.closed)
    if args.maskbench is not None:
        cases = [*maskbench_cases(args.maskbench)][:: args.every]
        found["MaskBench"] = run("MaskBench", cases, args.walks, args.closed)
    if args.json is not None:
        args.json.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
