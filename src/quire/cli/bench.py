"""`quire bench`: runs a synthetic workload offline and says how fast it went."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_options
from quire.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.engine.llm import LLM

PERCENTILES = (50, 90, 99)
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A synthetic workload; everything follows from these numbers.

    Args:
        num_prompts: requests, all sent at once.
        input_len: tokens of a prompt, the shared prefix included.
        output_len: new tokens of a request; end-of-sequence tokens are ignored.
        spread: lengths are uniform between (1 - spread) and (1 + spread) times the above.
        shared_prefix: tokens that all prompts start with.
        workload_seed: where lengths and tokens come from.
    """

    num_prompts: int = 16
    input_len: int = 128
    output_len: int = 64
    spread: float = 0.0
    shared_prefix: int = 0
    workload_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Args:
        wall_s: from the first request sent to the last token received.
        output_tokens_per_s: new tokens of all requests per second of `wall_s`.
        total_tokens_per_s: the same with the prompts' tokens.
        time_to_first_token_s: percentile -> seconds from the start, waiting included.
        inter_token_latency_s: percentile -> seconds between two tokens of one request.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_preemptions: int
    num_steps: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token_s: dict[str, float]
    inter_token_latency_s: dict[str, float]


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed on a synthetic workload",
        description="Serve random prompts offline, greedily and past the end-of-sequence token, and report tokens per "
        "second, time to first token and inter-token latency.",
    )
    default = Job()
    parser.add_argument("--num-prompts", type=_count, default=default.num_prompts, metavar="N", help="requests at once")
    parser.add_argument("--input-len", type=_count, default=default.input_len, metavar="N", help="tokens of a prompt")
    parser.add_argument("--output-len", type=_count, default=default.output_len, metavar="N", help="tokens to generate")
    parser.add_argument(
        "--spread", type=float, default=default.spread, metavar="X", help="lengths vary by this share, 0 to 1"
    )
    parser.add_argument(
        "--shared-prefix", type=int, default=default.shared_prefix, metavar="N", help="tokens that all prompts share"
    )
    parser.add_argument(
        "--workload-seed", type=int, default=default.workload_seed, metavar="N", help="seed of lengths and tokens"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option that is refused, or prompts that do not fit the engine.
    """
    job = Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})
    _check(job)
    from quire.engine.llm import LLM

    llm = LLM(**{"skip_tokenizer_init": True, **engine_options(args)})
    try:
        report = measure(llm, job)
    finally:
        llm.close()
    if args.json:
        print(json.dumps({"model": args.model, "workload": asdict(job), "report": asdict(report)}))
    else:
        print("\n".join((*llm.resolved.lines(), "", *lines(job, report))))
    return 0


def requests(job: Job, vocab_size: int) -> list[tuple[list[int], int]]:
    """Return the token ids of each prompt and the number of new tokens wanted."""
    rng = random.Random(job.workload_seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - job.spread, 1 + job.spread)))

    prefix = [rng.randrange(vocab_size) for _ in range(job.shared_prefix)]
    many = []
    for _ in range(job.num_prompts):
        # At least one token of its own, so that no two requests are the same.
        num_own = max(1, length(job.input_len) - len(prefix))
        many.append((prefix + [rng.randrange(vocab_size) for _ in range(num_own)], length(job.output_len)))
    return many


def measure(llm: LLM, job: Job) -> Report:
    """Serve the workload once, after a short warm-up.

    Raises:
        WorkerError: a request failed, so that the figures would mean nothing.
    """
    from quire.sequences.params import SamplingParams

    def greedy(num_new: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)

    list(llm.stream([{"prompt_token_ids": [0]}], greedy(WARM_UP_TOKENS)))
    many = requests(job, llm.resolved.vocab_size)
    prompts: list[Any] = [{"prompt_token_ids": token_ids} for token_ids, _ in many]
    before = llm.stats
    times: dict[str, list[float]] = {}
    num_cached: dict[str, int] = {}
    num_new = 0
    started = time.perf_counter()
    for delta in llm.stream(prompts, [greedy(wanted) for _, wanted in many]):
        if delta.error is not None:
            raise WorkerError(f"request {delta.request_id} failed: {delta.error}")
        times.setdefault(delta.request_id, []).append(time.perf_counter())
        num_cached[delta.request_id] = delta.num_cached_tokens
        num_new += sum(len(output.token_ids) for output in delta.outputs)
    wall_s = time.perf_counter() - started
    now = llm.stats
    num_prompt = sum(len(token_ids) for token_ids, _ in many)
    gaps = [later - earlier for each in times.values() for earlier, later in pairwise(each)]
    return Report(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(num_cached.values()),
        num_new_tokens=num_new,
        num_preemptions=now.num_preemptions - before.num_preemptions,
        num_steps=now.num_steps - before.num_steps,
        wall_s=wall_s,
        output_tokens_per_s=num_new / wall_s,
        total_tokens_per_s=(num_prompt + num_new) / wall_s,
        time_to_first_token_s=percentiles([each[0] - started for each in times.values()]),
        inter_token_latency_s=percentiles(gaps),
    )


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the percentiles that people ask for, and the mean; empty where there is no value."""
    if not values:
        return {}
    ranked = sorted(values)
    # The smallest value that at least p percent of the values do not exceed.
    named = {f"p{p}": ranked[max(0, -(-len(ranked) * p // 100) - 1)] for p in PERCENTILES}
    return {"mean": statistics.fmean(ranked), **named}


def lines(job: Job, report: Report) -> list[str]:
    """Return a report in words."""
    shown = [
        f"{job.num_prompts:,} requests at once: {report.num_prompt_tokens:,} prompt tokens "
        f"({report.num_cached_tokens:,} from the prefix cache), {report.num_new_tokens:,} new tokens",
        f"{report.wall_s:.2f} s in {report.num_steps:,} steps, {report.num_preemptions:,} preemptions",
        f"Output: {report.output_tokens_per_s:,.1f} tokens/s; with prompts: {report.total_tokens_per_s:,.1f} tokens/s",
    ]
    for title, values in (
        ("Time to first token", report.time_to_first_token_s),
        ("Inter-token latency", report.inter_token_latency_s),
    ):
        if values:
            shown.append(f"{title}: " + ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in values.items()))
    return shown


def _check(job: Job) -> None:
    if not 0.0 <= job.spread <= 1.0:
        raise ConfigError(f"spread must be a number from 0 to 1, got {job.spread}", field="spread")
    if not 0 <= job.shared_prefix < job.input_len:
        raise ConfigError(
            f"shared_prefix must be from 0 to input_len - 1 ({job.input_len - 1}), got {job.shared_prefix}",
            field="shared_prefix",
        )


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count
