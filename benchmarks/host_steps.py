"""The host's part of a captured decode step on a GPU: `python -m benchmarks.host_steps`; needs Triton, no GPU.

The real scheduler on the real memory, block tables, plans of attention, the sampler for GPUs and the texts' bookkeeping
without a tokenizer, for greedy sequences of the shape of Llama-3.1-8B's attention, step by step. What is left out is
what needs a GPU: the replay of the graph is one call there, and copies are queued and not made. The vocabulary has 16
tokens, so that the operators of the sampler, which a GPU runs, take hardly any time here. Requests have one output at
their end, as those of `LLM.generate`; with `--deltas 1` one for each step, as few streams have, and with `--deltas 4`
one for each four, as many streams have, whose tokens wait for one another while their readers are busy.

Parts of a step, in their order:

- plan: which sequences decode, and their blocks;
- tables: the changes of block tables, and of the sampler's states;
- lay out: token ids, positions and block tables as tensors;
- share: what sequences share is found, or found to be what it was;
- write: slots, tables and work of attention go into static buffers;
- copy: these are copied;
- sample: the greatest logits, read by the host;
- take in: tokens are appended, full blocks published, sequences ended;
- outputs: outputs of all requests.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, Final

import torch

from benchmarks.captured_plans import GROUP, HEAD_DIM, KV_HEADS, PROCESSORS
from benchmarks.gpu.memory import BLOCK_SIZE, make_memory
from quire.engine.outputs.output_processor import OutputProcessor
from quire.execution.capture.captured_passes import StepPass
from quire.execution.capture.graph_ladder import GraphLadder
from quire.execution.sampling.device.device_draws import TorchDraws
from quire.execution.sampling.sampler import Sampler
from quire.execution.step.batch import BatchBuilder
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.models.specs.spec import TokenCacheShape
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.ops import PagedKV
from quire.ops.interface.static_steps import StaticLimits
from quire.ops.triton.attention.static_attention import TritonStaticAttention, TritonStaticTokens
from quire.ops.triton.launches import LAUNCH_BYTES
from quire.ops.triton.triton_ops import TritonOps
from quire.scheduling.plan import ItemResult, StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request

VOCAB: Final = 16
PARTS: Final = ("plan", "tables", "lay out", "share", "write", "copy", "sample", "take in", "outputs")
CACHE: Final = TokenCacheShape(KV_HEADS, HEAD_DIM)


class NoCapture:
    """Captures nothing: a replay does nothing."""

    def capture(self, run: Callable[[], object]) -> Any:  # noqa: ARG002 - what a GPU would run
        """Return a call that does nothing."""
        return SimpleNamespace(replay=lambda: None)

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> Any:  # noqa: ARG002
        """Return a call that does nothing, in one piece."""
        return [SimpleNamespace(replay=lambda: None)]


def make_ladder(num_sequences: int, num_blocks: int) -> tuple[GraphLadder, PagedKV]:
    """Return the captured steps of one size, of which nothing is captured, and their KV memory of one block."""
    device = torch.device("cpu")
    ops, kv = TritonOps(device), make_memory(2, 1, KV_HEADS, HEAD_DIM, device)
    ops.device.num_processors, ops.device.launch_bytes = PROCESSORS, LAUNCH_BYTES
    spec = SimpleNamespace(width=1, vocab_size=VOCAB)
    groups = [SimpleNamespace(cache=CACHE)]
    decoder: Any = SimpleNamespace(
        ops=ops,
        device=device,
        dtype=torch.float32,
        spec=spec,
        cache_groups=groups,
        ranks=None,
        step_adapters=StepAdapters(),
    )
    limits = StaticLimits(num_sequences, 2 * num_blocks)
    ladder = GraphLadder(decoder, [kv], [num_sequences], limits, BLOCK_SIZE, NoCapture(), StepPass(decoder, [kv]))  # type: ignore[list-item]
    (static,) = ladder._groups
    assert isinstance(static, TritonStaticTokens)
    # As a capture does, for layers with one number of query heads.
    attention = TritonStaticAttention(static.batch(num_sequences, shares=True), kv, ops.device)
    static.launch(GROUP, num_sequences, attention.tiles(GROUP)[0], attention.sharing_rule(GROUP), shares=True)
    return ladder, kv


class HostSteps:
    """Sequences that decode, with all of the host's state.

    Args:
        num_sequences: number of sequences.
        context: tokens of each at the beginning.
        shared: tokens of these that all have in common.
        num_steps: steps that they decode at least.
        deltas: number of steps for each output; 0 makes none before the end.
    """

    def __init__(self, num_sequences: int, context: int, shared: int, num_steps: int, *, deltas: int) -> None:
        self._deltas = deltas
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self._tick = 0
        each = -(-(context + num_steps) // BLOCK_SIZE) + 3
        memory = KVCacheManager([FullAttention(block_size=BLOCK_SIZE)], num_sequences * each, key=b"benchmark")
        self._scheduler = Scheduler(memory, max_num_seqs=num_sequences, max_num_batched_tokens=context * num_sequences)
        self._builder, self._sampler = (
            BatchBuilder(BLOCK_SIZE, "cpu", [CACHE]),
            Sampler(torch.device("cpu"), draws=TorchDraws()),
        )
        self._outputs = OutputProcessor(None, time.monotonic)
        self._ladder, _ = make_ladder(num_sequences, num_sequences * each)
        for owner, name, part in (
            (self._ladder, "_lay_out", "lay out"),
            (self._ladder, "_share", "share"),
            (self._ladder, "_write", "write"),
            (self._ladder._memory, "upload", "copy"),
        ):
            setattr(owner, name, self._timed_call(getattr(owner, name), part))
        self._add_requests(num_sequences, context, shared, num_steps)

    def _add_requests(self, num_sequences: int, context: int, shared: int, num_steps: int) -> None:
        rng = random.Random(0)
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 16, ignore_eos=True, detokenize=False)
        common = [rng.randrange(150_000) for _ in range(shared)]
        for idx in range(num_sequences):
            # Lengths differ by less than a block, so that sequences do not all need a new block in the same step.
            own = context - shared - idx % BLOCK_SIZE
            prompt = common + [rng.randrange(150_000) for _ in range(own)]
            request = Request(str(idx), prompt, params, len(prompt) + num_steps + 16, frozenset(), arrival=idx, seed=0)
            self._scheduler.add(request)
            self._outputs.add_request(request, None, 0.0, final_only=not self._deltas)
            if idx == 0:  # the others find its blocks
                self.prefill()
        while self._scheduler.waiting:
            self.prefill()

    def _timed_call(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self._timed(part):
                return call(*args)

        return timed

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.times[part].append((time.thread_time() - began) * 1e3)

    def prefill(self) -> None:
        """Run a step of prompts, which nothing computes."""
        plan = self._plan()
        self._builder.apply_plan(plan)
        self._sampler.begin_step(plan)
        self._update(plan, [ItemResult(item.seq_id, (1,) * item.num_samples) for item in plan.items])

    def step(self) -> None:
        """Run a step of decodes, as the engine and `ModelRunner` do."""
        with self._timed("plan"):
            plan = self._plan()
        with self._timed("tables"):
            self._builder.apply_plan(plan)
            self._sampler.begin_step(plan)
        step = self._ladder.run(plan.items, self._builder)
        with self._timed("sample"):
            results = self._sampler.sample(step.outputs, plan.items, step.next_positions)
        self._update(plan, results)

    def _plan(self) -> StepPlan:
        self._tick += 1
        return self._scheduler.plan(self._tick)

    def _update(self, plan: StepPlan, results: list[ItemResult]) -> None:
        with self._timed("take in"):
            events = self._scheduler.update_from_results(plan.items, results)
        with self._timed("outputs"):
            self._outputs.add_tokens(events, results)
            self._outputs.take_outputs(lambda: self._deltas > 1 and self._tick % self._deltas != 0)


@torch.inference_mode()
def measure(
    num_sequences: int, context: int, shared: int, num_steps: int, *, deltas: int = 0
) -> dict[str, list[float]]:
    """Return milliseconds of processor time of each part, by steps, after a fifth of them that are not measured."""
    steps = HostSteps(num_sequences, context, shared, num_steps, deltas=deltas)
    for part in PARTS:
        steps.times[part].clear()
    gc.collect()
    gc.freeze()  # as a server does
    for _ in range(num_steps):
        steps.step()
    return {part: times[num_steps // 5 :] for part, times in steps.times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--deltas", type=int, default=0, metavar="STEPS", help="steps for each output of a request")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| tokens | in common | milliseconds of processor time |", *PARTS, "sum |", sep=" | ")
    print("|---" * (len(PARTS) + 4) + "|")
    for context, shared in ((1024, 0), (1024, 896), (8192, 8064)):
        times = measure(args.sequences, context, shared, args.steps, deltas=args.deltas)
        times["sum"] = [sum(each) for each in zip(*times.values(), strict=True)]
        for name, figure in (("mean", mean), ("median", median), ("least", min)):
            figures = (f"{figure(each):.2f}" for each in times.values())
            print(f"| {context} | {shared} | {name} |", " | ".join(figures), "|")


if __name__ == "__main__":
    main()
