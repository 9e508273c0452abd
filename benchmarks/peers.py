"""Engines that have environments of their own: vLLM, OpenVINO GenAI and llama.cpp, each step run by hand."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.serving import NUM_KV_TOKENS, Figures, Setup, serve_by_steps
from benchmarks.shapes import CheckpointShape
from quire.measurement.bench.workloads import BenchRequest

STEP_TOKENS = 2048  # prompt tokens in a step, for all three
OPENVINO_BLOCK_SIZE = 32  # of its CPU plug-in
UBATCH = 512  # llama.cpp computes a step in pieces of this many tokens


class VllmEngine:
    """vLLM for CPUs, its engine in this process."""

    def __init__(self, setup: Setup) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        vllm = importlib.import_module("vllm")
        value_bytes = 4 if setup.options.get("dtype") == "float32" else 2
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.num_seqs,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=setup.caching,
            kv_cache_memory_bytes=NUM_KV_TOKENS * CheckpointShape.read(setup.model).kv_token_bytes(value_bytes),
            disable_log_stats=True,
            **setup.options,
        ).llm_engine
        self._places: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._num_added = 0

    def add(self, requests: list[BenchRequest]) -> None:
        """Queue requests."""
        self._places, self._counts = {}, {}
        for idx, request in enumerate(requests):
            name = str(self._num_added)
            self._num_added += 1
            params = self._params(temperature=0.0, max_tokens=request.num_new, ignore_eos=True, detokenize=False)
            self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            self._places[name], self._counts[name] = idx, 0

    def step(self) -> list[tuple[int, int]]:
        """Run one step."""
        news = []
        for output in self._engine.step():
            name, count = output.request_id, len(output.outputs[0].token_ids)
            news.append((self._places[name], count - self._counts[name]))
            self._counts[name] = count
        return news

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once."""
        return serve_by_steps(self, requests)


class OpenVinoEngine:
    """OpenVINO GenAI's continuous batching."""

    def __init__(self, setup: Setup) -> None:
        genai = importlib.import_module("openvino_genai")
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = STEP_TOKENS
        scheduling.max_num_seqs = setup.num_seqs
        scheduling.num_kv_blocks = NUM_KV_TOKENS // OPENVINO_BLOCK_SIZE
        scheduling.enable_prefix_caching = setup.caching
        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": setup.num_threads,
            **setup.options,
        }
        self._genai = genai
        self._tensor = importlib.import_module("openvino").Tensor
        self._array: Any = importlib.import_module("numpy").array
        self._pipeline = genai.ContinuousBatchingPipeline(str(setup.model), scheduling, "CPU", properties)
        self._handles: list[Any] = []
        self._num_added = 0

    def add(self, requests: list[BenchRequest]) -> None:
        """Queue requests."""
        self._handles = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.num_new
            config.ignore_eos, config.do_sample = True, False
            ids = self._tensor(self._array([request.prompt], dtype="int64"))
            self._handles.append(self._pipeline.add_request(self._num_added, ids, config))
            self._num_added += 1

    def step(self) -> list[tuple[int, int]]:
        """Run one step."""
        self._pipeline.step()
        return [
            (idx, len(output.generated_ids))
            for idx, handle in enumerate(self._handles)
            if handle.can_read()
            for output in handle.read().values()
        ]

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once."""
        return serve_by_steps(self, requests)


class _Row(NamedTuple):
    """One token of a batch: its sequence, its place in it, and whether the next token is wanted of it."""

    token_id: int
    position: int
    seq_id: int
    is_last: bool


class LlamaCppEngine:
    """llama.cpp's library under a scheduler of our own, as the library has none.

    Each step is one token of every running sequence, then prompt tokens in order. Sequences have a part of the cache
    each where the longest request fits in one, else they share it. With caching, a request whose first tokens are those
    of the request that was served last on its own starts with a copy of them, as the server that comes with the library
    does it within a slot.
    """

    def __init__(self, setup: Setup) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        numpy = importlib.import_module("numpy")
        lib = self._lib
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, None)
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_mmap = False
        self._model = lib.llama_model_load_from_file(str(setup.model).encode(), model_params)
        params = lib.llama_context_default_params()
        params.kv_unified = NUM_KV_TOKENS // setup.num_seqs < setup.max_model_len
        self._kept_id = setup.num_seqs if params.kv_unified and setup.caching else None
        params.n_ctx, params.n_batch, params.n_ubatch = NUM_KV_TOKENS, STEP_TOKENS, UBATCH
        params.n_seq_max = setup.num_seqs + (self._kept_id is not None)
        params.n_threads = params.n_threads_batch = setup.num_threads
        params.flash_attn_type = 1
        params.no_perf = True
        for name, value in setup.options.items():
            setattr(params, name, value)
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {setup}")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(STEP_TOKENS, 0, 1)
        self._logits_shape = (lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)),)
        self._as_array: Any = numpy.ctypeslib.as_array
        self._requests: list[BenchRequest] = []
        self._outputs: list[list[int]] = []
        self._num_computed: list[int] = []
        self._kept: list[int] = []

    def add(self, requests: list[BenchRequest]) -> None:
        """Give each request a sequence, with what is known of its prompt."""
        for seq_id in range(len(self._requests)):
            self._lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        self._requests = requests
        self._outputs = [[] for _ in requests]
        self._num_computed = [0] * len(requests)
        for seq_id, request in enumerate(requests):
            # At least one token is computed, for its logits.
            known = min(num_shared(self._kept, request.prompt), len(request.prompt) - 1)
            if known:
                self._lib.llama_memory_seq_cp(self._memory, self._kept_id, seq_id, 0, known)
                self._num_computed[seq_id] = known

    def step(self) -> list[tuple[int, int]]:
        """Run one step."""
        rows = self._next_rows()
        batch = self._batch
        batch.n_tokens = len(rows)
        for idx, row in enumerate(rows):
            batch.token[idx], batch.pos[idx] = row.token_id, row.position
            batch.n_seq_id[idx], batch.seq_id[idx][0] = 1, row.seq_id
            batch.logits[idx] = row.is_last
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}")
        for idx, row in enumerate(rows):
            if row.is_last:
                logits = self._lib.llama_get_logits_ith(self._context, idx)
                self._outputs[row.seq_id].append(int(self._as_array(logits, self._logits_shape).argmax()))
        return [(row.seq_id, 1) for row in rows if row.is_last]

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once; what one request alone has left is kept for the next."""
        figures = serve_by_steps(self, requests)
        if self._kept_id is not None:
            self._lib.llama_memory_seq_rm(self._memory, self._kept_id, -1, -1)
            self._kept = requests[0].prompt if len(requests) == 1 else []
            if self._kept:
                self._lib.llama_memory_seq_cp(self._memory, 0, self._kept_id, 0, len(self._kept))
        return figures

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of each request that was served last."""
        return self._outputs

    def logits(self, ids: list[int]) -> Iterator[bytes]:
        """Yield the logits of each token of a sequence, float32."""
        self.add([BenchRequest(ids, 0)])
        batch = self._batch
        for first in range(0, len(ids), UBATCH):
            part = ids[first : first + UBATCH]
            batch.n_tokens = len(part)
            for idx, token_id in enumerate(part):
                batch.token[idx], batch.pos[idx] = token_id, first + idx
                batch.n_seq_id[idx], batch.seq_id[idx][0] = 1, 0
                batch.logits[idx] = True
            status = self._lib.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode answers {status}")
            for idx in range(len(part)):
                logits = self._lib.llama_get_logits_ith(self._context, idx)
                yield self._as_array(logits, self._logits_shape).tobytes()

    def _next_rows(self) -> list[_Row]:
        """Return the tokens of the next step, and count them as computed."""
        rows: list[_Row] = []
        for seq_id, (request, output) in enumerate(zip(self._requests, self._outputs, strict=True)):
            if output and len(output) < request.num_new:
                rows.append(_Row(output[-1], self._num_computed[seq_id], seq_id, is_last=True))
                self._num_computed[seq_id] += 1
        for seq_id, request in enumerate(self._requests):
            begin = self._num_computed[seq_id]
            end = min(len(request.prompt), begin + STEP_TOKENS - len(rows))
            for position in range(begin, end):
                is_last = position == len(request.prompt) - 1
                rows.append(_Row(request.prompt[position], position, seq_id, is_last))
            self._num_computed[seq_id] = max(begin, end)
        return rows


class IkLlamaCppEngine(LlamaCppEngine):
    """ik_llama.cpp, a fork with kernels of its own, under the same scheduler; nothing is shared between requests.

    Weights are repacked for the processor at load, as its option `-rtr` does.
    """

    def __init__(self, setup: Setup) -> None:
        self._lib = importlib.import_module("ik_llama_cpp._ctypes_api")
        lib = self._lib
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers, model_params.use_mmap, model_params.repack_tensors = 0, False, True
        self._model = lib.llama_model_load_from_file(str(setup.model).encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = NUM_KV_TOKENS, STEP_TOKENS, UBATCH
        params.n_seq_max = setup.num_seqs
        params.n_threads = params.n_threads_batch = setup.num_threads
        params.flash_attn = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp makes no context for {setup}")
        self._kept_id = None
        self._batch = lib.llama_batch_init(STEP_TOKENS, 0, 1)
        self._logits_shape = (lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)),)
        self._as_array = importlib.import_module("numpy").ctypeslib.as_array

    def add(self, requests: list[BenchRequest]) -> None:
        """Give each request an empty sequence."""
        self._lib.llama_kv_cache_clear(self._context)
        self._requests = requests
        self._outputs = [[] for _ in requests]
        self._num_computed = [0] * len(requests)


def num_shared(first: list[int], second: list[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
