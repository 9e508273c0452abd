"""The engines under test, and the process that each of them runs in.

Every engine serves the same token ids greedily, past the end-of-sequence token, in bfloat16 on the same number of
threads. A process of its own keeps its memory and its thread pool from touching the others'. The process reads one
line `name run` at a time and answers with one line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workloads import Request, workload

BLOCK_SIZE, NUM_BLOCKS = 16, 1280  # 20,480 tokens of KV for everyone
MAX_MODEL_LEN = 4608
ANSWER = "RESULT "
WARM_UP_RUN = 999  # tokens that no measured run uses


class Engine(Protocol):
    """Serves token ids."""

    def serve(self, requests: list[Request]) -> dict[str, float]:
        """Serve requests that arrive at once.

        Returns:
            `wall_s`, and `all_started_s`: when the last request got its first token.
        """


class QuireEngine:
    """Quire through its Python door."""

    def __init__(self, model: Path, num_threads: int, caching: bool, weight_packing: str = "plain") -> None:
        from quire import LLM

        self._llm = LLM(
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            enable_prefix_caching=caching,
            num_threads=num_threads,
            weight_packing=weight_packing,
        )

    def serve(self, requests: list[Request]) -> dict[str, float]:
        """Serve requests that arrive at once."""
        from quire import SamplingParams

        prompts: list[Any] = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.num_new, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - started
        check_counts(requests, [len(output.outputs[0].token_ids) for output in outputs])
        arrived = min(output.metrics.arrival_s for output in outputs)
        first_tokens = [output.metrics.first_token_s or 0.0 for output in outputs]
        return {"wall_s": wall_s, "all_started_s": max(first_tokens) - arrived}


class GenerateEngine:
    """`generate` of transformers: one left-padded batch that runs as long as its longest output."""

    def __init__(self, model: Path, num_threads: int, caching: bool) -> None:
        del caching  # it has no prefix cache
        self._model = load_transformers(model, num_threads)

    def serve(self, requests: list[Request]) -> dict[str, float]:
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
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([note_the_time]),
            )
        wall_s = time.perf_counter() - started
        check_counts(requests, [min(output.shape[1] - longest, request.num_new) for request in requests])
        return {"wall_s": wall_s, "all_started_s": steps[0] - started}


class ContinuousBatchingEngine:
    """The continuous batching of transformers, on its paged cache."""

    def __init__(self, model: Path, num_threads: int, caching: bool) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = load_transformers(model, num_threads)
        config = ContinuousBatchingConfig(
            page_size=2 * BLOCK_SIZE,
            num_blocks=NUM_BLOCKS // 2,
            max_batch_tokens=1024,
            max_requests_per_batch=16,
            allow_block_sharing=caching,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._open = self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False
        )
        self._manager = self._open.__enter__()

    def serve(self, requests: list[Request]) -> dict[str, float]:
        """Serve requests that arrive at once."""
        started = time.perf_counter()
        for request in requests:
            self._manager.add_request(
                request.prompt, max_new_tokens=request.num_new, eos_token_id=-1, record_timestamps=True
            )
        counts: list[int] = []
        first_tokens: list[float] = []
        while len(counts) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the continuous batching thread has ended")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                counts.append(len(result.generated_tokens))
                first_tokens.append(result.timestamps[0])
        wall_s = time.perf_counter() - started
        check_counts(sorted(requests, key=lambda request: request.num_new), sorted(counts))
        return {"wall_s": wall_s, "all_started_s": max(first_tokens) - started}


ENGINES: dict[str, Callable[[Path, int, bool], Engine]] = {
    "quire": QuireEngine,
    "lossless": partial(QuireEngine, weight_packing="lossless"),
    "generate": GenerateEngine,
    "cb": ContinuousBatchingEngine,
}


def load_transformers(model: Path, num_threads: int) -> Any:
    """Return the checkpoint as a transformers model."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(num_threads)
    return Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def check_counts(requests: list[Request], counts: list[int]) -> None:
    """Make sure that an engine has done the work it is timed for."""
    wanted = [request.num_new for request in requests]
    if counts != wanted:
        raise RuntimeError(f"asked for {wanted} new tokens, got {counts}")


def peak_memory_gib() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Serve the runs whose names come in on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--no-caching", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    engine: Engine = ENGINES[options.engine](options.model, options.threads, not options.no_caching)
    warm_up = workload("W1", WARM_UP_RUN).requests[0]
    engine.serve([warm_up._replace(num_new=4)])
    print(f"{ANSWER}{json.dumps({'ready_s': time.perf_counter() - started})}", flush=True)
    for line in sys.stdin:
        name, run = line.split()
        work = workload(name, int(run))
        if work.before:
            engine.serve(work.before)
        figures = engine.serve(work.requests)
        figures |= {"tokens_per_s": work.num_new / figures["wall_s"], "peak_memory_gib": peak_memory_gib()}
        print(f"{ANSWER}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
