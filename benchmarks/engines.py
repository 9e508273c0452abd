"""The engines under test, and the process that each of them runs in.

Every engine serves the same token ids greedily, past the end-of-sequence token, on the same number of threads. A
process of its own keeps its memory and its thread pool from touching the others', and may belong to an environment of
its own: nothing but the standard library is imported before the engine is made. The process reads one line `name run`
at a time and answers with one line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS, PACKAGES
from benchmarks.machine import peak_memory_bytes, version_of
from benchmarks.peers import IkLlamaCppEngine, LlamaCppEngine, OpenVinoEngine, VllmEngine
from benchmarks.serving import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    BenchmarkEngine,
    Figures,
    Setup,
    figures_of,
    serve_by_steps,
)
from quire.measurement.bench.workloads import BenchRequest, workload

ANSWER = "RESULT "
WARM_UP_RUN = 999  # tokens that no measured run uses


class QuireEngine:
    """Quire, by the engine that all its interfaces use."""

    def __init__(self, setup: Setup) -> None:
        from quire import LLM

        self._engine = LLM(
            model=str(setup.model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=setup.max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            max_num_seqs=setup.num_seqs,
            enable_prefix_caching=setup.caching,
            num_threads=setup.num_threads,
            **setup.options,
        ).engine

    def add(self, requests: list[BenchRequest]) -> None:
        """Queue requests."""
        from quire import SamplingParams

        for idx, request in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=request.num_new, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(idx), {"prompt_token_ids": request.prompt}, params)

    def step(self) -> list[tuple[int, int]]:
        """Run one step."""
        return [(int(news.request_id), len(news.outputs[0].token_ids)) for news in self._engine.step()]

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once."""
        return serve_by_steps(self, requests)


class GenerateEngine:
    """`generate` of transformers: one left-padded batch that runs as long as its longest output."""

    def __init__(self, setup: Setup) -> None:
        self._model = load_transformers(setup)

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once."""
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        longest, most_new = max(len(r.prompt) for r in requests), max(r.num_new for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        steps: list[float] = []

        def note_the_time(ids: torch.Tensor, scores: object, **rest: object) -> torch.Tensor:
            del scores, rest
            steps.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        config = GenerationConfig(max_new_tokens=most_new, do_sample=False, eos_token_id=None, pad_token_id=0)
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([note_the_time]),
            )
        return figures_of(requests, started_s, [steps[: request.num_new] for request in requests])


class ContinuousBatchingEngine:
    """The continuous batching of transformers, on its paged cache."""

    def __init__(self, setup: Setup) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = load_transformers(setup)
        config = ContinuousBatchingConfig(
            page_size=2 * BLOCK_SIZE,
            num_blocks=NUM_BLOCKS // 2,
            max_batch_tokens=1024,
            max_requests_per_batch=setup.num_seqs,
            allow_block_sharing=setup.caching,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._open = self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False
        )
        self._manager = self._open.__enter__()

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once."""
        started_s = time.perf_counter()
        places = {
            self._manager.add_request(
                request.prompt, max_new_tokens=request.num_new, eos_token_id=-1, record_timestamps=True
            ): idx
            for idx, request in enumerate(requests)
        }
        times: list[list[float]] = [[] for _ in requests]
        while not all(times):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the continuous batching thread has ended")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                times[places[result.request_id]] = result.timestamps
        return figures_of(requests, started_s, times)


ENGINES: dict[str, Any] = {
    "quire": QuireEngine,
    "generate": GenerateEngine,
    "cb": ContinuousBatchingEngine,
    "vllm": VllmEngine,
    "openvino": OpenVinoEngine,
    "llamacpp": LlamaCppEngine,
    "ik": IkLlamaCppEngine,
}


def load_transformers(setup: Setup) -> Any:
    """Return the checkpoint as a transformers model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup.num_threads)
    return AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=torch.bfloat16, attn_implementation="sdpa", **setup.options
    ).eval()


def main() -> None:
    """Serve the runs whose names come in on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--no-caching", action="store_true")
    options = parser.parse_args()
    who = CONTENDERS[options.contender]
    started = time.perf_counter()
    limits = options.sequences, options.max_model_len
    setup = Setup(options.model, options.threads, *limits, not options.no_caching, who.options)
    engine: BenchmarkEngine = ENGINES[who.engine](setup)
    warm_up = workload("W1", WARM_UP_RUN).requests[0]
    engine.serve([warm_up._replace(num_new=4)])
    ready = {"ready_s": time.perf_counter() - started, "version": version_of(PACKAGES[who.engine])}
    print(f"{ANSWER}{json.dumps(ready)}", flush=True)
    for line in sys.stdin:
        name, run = line.split()
        work = workload(name, int(run))
        if work.before:
            engine.serve(work.before)
        figures = engine.serve(work.requests)
        print(f"{ANSWER}{json.dumps(figures | {'peak_memory_bytes': peak_memory_bytes()})}", flush=True)


if __name__ == "__main__":
    main()
