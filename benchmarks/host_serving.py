"""The host's part of nano-vllm's benchmark on a GPU: `python -m benchmarks.host_serving`; needs Triton, no GPU.

256 requests of 100 to 1,024 tokens in and out, as `benchmarks.gpu` serves them, through the real engine with
asynchronous scheduling: prompts that are computed in steps of 8,192 tokens, decodes that are captured, sequences that
end. What the host does of the data plane is real: block tables, plans of attention, parameters of draws, tokens that
are read a step later. What is left out is what needs a GPU: kernels, their launches, and copies; every token is 0.

Printed are milliseconds of processor time a step; then the sum of the least times of each step, as all runs have the
same steps. `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.captured_plans import GROUP
from benchmarks.gpu.memory import BLOCK_SIZE
from benchmarks.gpu.nano_vllm import MOST, NUM_REQUESTS, TEMPERATURE, nano_requests
from benchmarks.gpu.shapes import REHEARSED
from benchmarks.host_steps import CACHE, VOCAB, make_ladder
from benchmarks.make_model import write
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.startup.loading import Wrappers
from quire.engine.startup.start import load
from quire.execution.capture.captured_steps import CapturedSteps
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.runners.runner import InProcessExecutor, ModelRunner
from quire.execution.sampling.sampler import Sampler
from quire.execution.step.batch import BatchBuilder
from quire.execution.step.embeddings import MultimodalEmbeddings
from quire.memory.results import NO_OPS
from quire.ops.interface.ops import AttentionBatch, PagedKV
from quire.ops.interface.token_draws import RowParameters
from quire.ops.triton.attention.step_attention import TritonStepAttention
from quire.platform.heap import frozen_heap
from quire.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from quire.sequences.params import SamplingParams

# Prompts have tokens of Qwen3's vocabulary: of a small one, many would begin alike.
SHAPE = REHEARSED._replace(vocab_size=151_936)
NUM_BLOCKS: Final = NUM_REQUESTS * (2 * MOST // BLOCK_SIZE + 1)
STEP_TOKENS: Final = 8192


class NoDraws:
    """Draws token 0 for every row."""

    def check_logits(self, logits: Tensor) -> Tensor:
        """Find nothing wrong."""
        return torch.zeros(len(logits), dtype=torch.int64)

    def draw_tokens(
        self,
        logits: Tensor,
        parameters: RowParameters | None,  # noqa: ARG002 - what a GPU reads
        positions: Tensor | None,  # noqa: ARG002
        before: Tensor | None,  # noqa: ARG002
    ) -> Tensor:
        """Return tokens and states of rows."""
        return torch.zeros(2, len(logits), dtype=torch.int64)


class HostDecoder:
    """A model whose attention is planned, and that computes nothing.

    Args:
        ladder_decoder: the one that the captured steps were made for.
    """

    def __init__(self, ladder_decoder: Any) -> None:
        self.ops, self.device, self.spec = ladder_decoder.ops, ladder_decoder.device, ladder_decoder.spec
        self.cache_groups = ladder_decoder.cache_groups
        self.is_follower, self.ranks = False, None

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,  # noqa: ARG002 - what a GPU reads
        batches: tuple[AttentionBatch, ...],
        storages: tuple[PagedKV, ...],
        given: Any = None,  # noqa: ARG002
        read: Any = None,
        adapters: Any = None,  # noqa: ARG002
    ) -> Tensor:
        """Plan the attention of all rows, and of those that are read; return as many hidden states."""
        num_rows = len(ids)
        for batch, count in ((batches[0], num_rows), (read and read.groups[0], 0 if read is None else len(read.rows))):
            if count:
                list(TritonStepAttention(batch, storages[0], self.ops.device)._launches(GROUP, count))
        return torch.zeros(num_rows if read is None else len(read.rows), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits that nobody reads."""
        return torch.zeros(len(hidden), VOCAB)

    def likeliest(self, hidden: Tensor) -> None:
        """Find nothing, as one process does."""


class TimedRunner(ModelRunner):
    """A runner that notes what steps had, and copies nothing.

    Attributes:
        items: items of each step.
    """

    items: list[Sequence[ScheduledSequence]]

    def num_decodes(self) -> list[int]:
        """Return the number of sequences of each step; 0 where it had prompts."""
        return [0 if any(len(item.token_ids) > 1 for item in items) else len(items) for items in self.items]

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self.items.append(plan.items)
        return super().execute(plan._replace(ops=NO_OPS))


def make_engine(folder: str) -> tuple[Engine, TimedRunner]:
    """Return an engine whose data plane computes nothing."""
    ladder, kv = make_ladder(NUM_REQUESTS, NUM_BLOCKS)
    deferred = DeferredTokens(torch.device("cpu"))
    computed: Any = ladder._computed
    decoder: Any = HostDecoder(computed._decoder)
    sampler = Sampler(torch.device("cpu"), draws=NoDraws(), deferred=deferred)
    builder = BatchBuilder(BLOCK_SIZE, "cpu", [CACHE], deferred)
    media = MultimodalEmbeddings(torch.device("cpu"))
    steps = CapturedSteps(ladder)
    runner = TimedRunner(decoder, [kv], builder, sampler, media, captured=steps)  # type: ignore[list-item]
    runner.items = []
    config = EngineConfig.from_options(
        model=folder,
        skip_tokenizer_init=True,
        async_scheduling=True,
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_model_len=2 * MOST + 8,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=STEP_TOKENS,
    )
    return load(config, wrap=Wrappers(executor=lambda _: InProcessExecutor(runner, deferred))).engine, runner


def serve(engine: Engine, temperature: float) -> list[float]:
    """Serve the requests; return seconds of processor time of each step."""
    for idx, (prompt, count) in enumerate(nano_requests(SHAPE.vocab_size)):
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count, detokenize=False)
        engine.add_request(str(idx), prompt, params, RequestOptions(final_only=True))
    seconds = []
    while engine.has_unfinished:
        began = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - began)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for run in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            write(SHAPE.config(), Path(folder))
            engine, runner = make_engine(folder)
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        with frozen_heap(is_wanted=True):  # as `LLM.generate` does on a GPU
            seconds = serve(engine, given.temperature)
        if given.profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        counted = [(1e3 * each, count) for each, count in zip(seconds, runner.num_decodes(), strict=False)]
        with_prompts, decodes = ([each for each, count in counted if bool(count) is kind] for kind in (False, True))
        print(
            f"run {run}: {sum(seconds):.2f} s; {len(decodes)} decodes of {fmean(decodes):.3f} ms (median "
            f"{median(decodes):.3f}), {len(with_prompts)} steps with prompts of {fmean(with_prompts):.3f} ms"
        )
        engine.close()
        runs.append(seconds)
    least = list(map(min, zip(*runs, strict=True)))
    print(f"least of the runs, step by step: {sum(least):.3f} s")
    full = [1e3 * each for each, count in zip(least, runner.num_decodes(), strict=False) if count == NUM_REQUESTS]
    print(f"of these, {len(full)} decodes of all sequences: {min(full):.3f} ms at the least, median {median(full):.3f}")


if __name__ == "__main__":
    main()
