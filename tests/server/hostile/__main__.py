"""Hostile requests in any number, and a table: `python -m tests.server.hostile --bodies 20000 --seed 1`.

One request again: `--only NUMBER` with the seed and the kinds of the run that found it. With `--router` they go through
`quire route`, whose memory and log are then looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from tests.server import tool_checkpoint
from tests.server.hostile.bodies import KINDS, MAX_BODY, Case, made_apart, make_case
from tests.server.hostile.runner import FLAGS, Attack, Report
from tests.server.process import running
from tests.serving.fleets import router_before

MIB = 1 << 20


def main() -> int:
    """Run, and return 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.hostile", description=__doc__)
    parser.add_argument("--bodies", type=int, default=1000, metavar="N", help="requests (default 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default 0)")
    parser.add_argument("--without", nargs="*", default=[], choices=KINDS, help="kinds to leave out")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="send this request alone, and show the answer")
    parser.add_argument("--attackers", type=int, default=4, metavar="N", help="requests at a time (default 4)")
    parser.add_argument("--router", action="store_true", help="send them through a router before the server")
    parser.add_argument("--settle", type=float, default=2.0, metavar="S", help="until memory is measured (default 2)")
    parser.add_argument("--log", type=Path, help="where the server's log goes (default: a temporary file)")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind not in args.without]
    with tempfile.TemporaryDirectory() as folder:
        model = tool_checkpoint.save(Path(folder) / "model", "hermes")
        log = args.log or Path(folder) / "log"
        with ExitStack() as stack:
            target = stack.enter_context(running(model, log, *FLAGS))
            if args.router:
                target = stack.enter_context(
                    router_before(target, log.with_name("router.log"), "--max-body-bytes", str(MAX_BODY))
                )
            attack = Attack(target, args.attackers, settle_s=args.settle)
            if args.only is not None:
                case: Future[Case] = Future()
                case.set_result(make_case(args.seed, args.only, kinds))
                print(case.result().raw[:2000])
                asyncio.run(attack.run([case], quiet_s=0))
            else:
                bodies, warm_up = made_apart(args.seed, args.bodies, kinds), made_apart(args.seed + 1, 300, kinds)
                with bodies as made, warm_up as made_first:
                    asyncio.run(attack.run(made, made_first))
            print_report(attack.report)
    return bool(attack.report.problems)


def print_report(report: Report) -> None:
    """Print the table."""
    for problem in report.problems[:50]:
        print(f"- {problem}")
    if len(report.problems) > 50:
        print(f"- and {len(report.problems) - 50} more")
    total = sum(report.statuses.values())
    by_status = ", ".join(f"{status or 'none'}: {count:,}" for status, count in sorted(report.statuses.items()))
    print(f"\n{total:,} answers in {report.seconds:.0f} s: {by_status}; {len(report.problems)} problems")
    print(f"\n| harmless requests | {'':5} | number | p50 ms | p99 ms | max ms |\n|---|---|---|---|---|---|")
    for kind, delays_s in report.delays_s.items():
        for when, times_s in (("quiet", report.quiet_s.get(kind, [])), ("now", delays_s)):
            row = sorted(times_s)
            shown = (
                [f"{row[int((len(row) - 1) * share)] * 1000:.1f}" for share in (0.5, 0.99, 1.0)] if row else ["-"] * 3
            )
            print(f"| {kind} | {when:5} | {len(row):,} | {' | '.join(shown)} |")
    print("\nslowest of them, and what was beside:")
    for took_s, beside in reversed(report.slowest):
        print(f"  {took_s * 1000:.0f} ms: {', '.join(beside)}")
    before, peak, after = (size / MIB for size in report.memory)
    print(f"\nmemory: {before:.0f} MiB before, {peak:.0f} at most, {after:.0f} afterwards ({after - before:+.0f})")


if __name__ == "__main__":
    sys.exit(main())
