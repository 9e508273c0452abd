"""The asynchronous interface: the engine steps in its own thread, and outputs stream to the tasks of event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.config import EngineConfig, ResolvedConfig
from quire.engine.adapters import acquire_adapter
from quire.engine.async_adapters import AsyncAdapters
from quire.engine.async_commands import Call
from quire.engine.async_engine_args import AsyncEngineArgs
from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.exporters.kv_report import KvReport
from quire.engine.exporters.prometheus import Metrics
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_builder import PreparedRequest
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.inputs.tokenizer_pool import TokenizerPool
from quire.engine.kv.pinning import ONE_TOKEN
from quire.engine.metrics.stats import EngineStats, Health
from quire.engine.outputs.mailbox import OutputMailbox
from quire.engine.outputs.outputs import OutputCollector, RequestOutput
from quire.engine.queue_slots import QueueSlots, SlotReservation
from quire.engine.startup.loading import LoadedModel
from quire.engine.startup.start import load
from quire.engine.submission import Submitter
from quire.errors import WorkerError
from quire.memory.usage import Usage
from quire.sequences.lora import LoRARequest
from quire.sequences.params import RequestOutputKind, SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")

# Seconds without a completed step after which an engine with work counts as stuck.
STUCK_AFTER_S = 60.0


class AsyncLLM:
    """Serves requests concurrently; public methods are called from event loops, the engine runs in its own thread.

    `async with AsyncLLM.from_options(...) as llm:` shuts it down at the end of the block. Once shut down, it raises
    `EngineClosed`.

    Args:
        model: the loaded model and its engine, which this object owns from now on.
        metrics: metrics of the engine; None makes them with a new registry.

    Attributes:
        texts: tokenizes texts and renders chats.
        pooling: pooling of the model's embeddings.
        adapters: loaded adapters.
        submitter: submits requests whose outputs go elsewhere than to the iterators of `generate`.
    """

    def __init__(self, model: LoadedModel, metrics: Metrics | None = None) -> None:
        self.model_name = model.name
        self.resolved: ResolvedConfig = model.engine.config
        self.tokenizer: Tokenizer | None = model.engine.tokenizer
        self.pooling = model.pooling
        self.metrics = metrics or Metrics(model.name)
        self.metrics.set_config(self.resolved)
        self.metrics.set_engine(model.engine)
        self.texts = TokenizerPool(
            model.engine.requests, self.tokenizer, self.resolved.max_model_len, self.resolved.sanitize_control_tokens
        )
        self.adapters = AsyncAdapters(model.engine.adapters, self._call)
        self._defaults = model.default_params
        self._engine = model.engine
        waiting = self._engine.scheduler.waiting
        self._slots = QueueSlots(self.resolved.max_queue_len, lambda: len(waiting))
        self._thread = EngineThread(self._engine, self.metrics, self._slots)
        if self._engine.kv_events is not None:
            self._engine.kv_events.wake = lambda: self._thread.put(Call(Engine.publish_kv_events))
        self.submitter = Submitter(self._engine, self._thread, self._slots, self.texts, self.adapters, self.metrics)

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """Load a model and start its engine.

        Raises:
            ConfigError: an option or a checkpoint that cannot be honoured.
        """
        return cls(load(config))

    @classmethod
    def from_options(cls, model: str = "bundled", **options: Any) -> AsyncLLM:
        """Load a model from flat options, as for `LLM(...)`, and start its engine."""
        return cls.from_config(EngineConfig.from_options(model=model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Load a model from vLLM's form of the options, and start its engine."""
        return cls.from_options(**engine_args.options)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- requests ----

    def reserve(self, count: int) -> SlotReservation:
        """Reserve slots of the waiting queue, before any other work is done for a request.

        Args:
            count: number of requests (prompts).

        Raises:
            InvalidParameter: the queue has fewer slots in all.
            QueueFull: fewer slots are free; nothing is reserved.
            EngineClosed: the engine was shut down.
            WorkerError: the engine is dead.
        """
        return self.submitter.reserve(count)

    def check_room(self) -> None:
        """Check that the waiting queue has a free slot; cheap.

        Raises:
            QueueFull: no slot is free.
        """
        self._slots.check()

    def generate(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        flow: str | None = None,
        place: SlotReservation | None = None,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        retain_cache: bool = False,
        lora_request: LoRARequest | None = None,
        final_only: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Generate, as a stream of outputs: deltas, unless `sampling_params.output_kind` is another kind.

        Leaving the iteration early (closing the iterator, cancelling the task) aborts the request in any state, and
        frees its memory before the next step.

        Args:
            prompt: text, token ids, or a mapping with one of them; or the result of `texts.prepare`.
            sampling_params: parameters of the sampling.
            request_id: unique id; None generates one.
            priority: lower runs first, under the scheduling policy "priority"; under "fcfs" it must be 0.
            flow: name of a flow; flows take turns, independent of their numbers of requests. None: a flow of its own.
            place: reservation with a slot for the request; None reserves one here.
            add_special_tokens: True to add the tokenizer's special tokens to a text prompt.
            cache_salt, tenant: only requests with equal values of both share cached prefixes.
            retain_cache: True to evict the request's cached blocks last, within `retention_limit`.
            lora_request: adapter of the request; None for the base model.
            final_only: True for deltas twice a second, which cost less; `RequestOutputKind.FINAL_ONLY` implies it.

        Raises:
            RequestError: the request was refused; raised at the first item, or at once for an option
                of a wrong type. `QueueFull` if no slot is free.
            EngineClosed: the engine was shut down.
            WorkerError: the engine is dead.
        """
        options = RequestOptions(
            priority=priority,
            flow=flow,
            cache_salt=cache_salt,
            tenant=tenant,
            retain_cache=retain_cache,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
            final_only=getattr(sampling_params, "output_kind", None) is RequestOutputKind.FINAL_ONLY or final_only,
        )
        return self.stream(prompt, sampling_params, options, place=place, request_id=request_id)

    async def stream(
        self,
        prompt: Prompt | PreparedRequest,
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str | None = None,
        place: SlotReservation | None = None,
        on_end: Callable[[Engine], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Submit a request, once its texts are tokens, and yield its outputs; see `generate`, `Stream`."""
        if isinstance(params, SamplingParams):  # else it is refused below
            params = params.clone()
        mailbox = OutputMailbox()
        stream = await self.submitter.submit(
            prompt, params, options, mailbox.put, place=place, request_id=request_id, on_end=on_end
        )
        is_finished = False
        collector = OutputCollector(params.output_kind)
        try:
            while not is_finished:
                delta = await mailbox.next()
                is_finished = delta.finished
                output = collector.add(delta)
                if output is not None:
                    yield output
        finally:
            if not is_finished:  # a request that the engine has ended is left alone
                self.submitter.abandon(stream)

    async def abort(self, request_id: str) -> bool:
        """End a request in any state; its iteration ends with an output of the finish reason "abort".

        Args:
            request_id: id given to `generate`, which submits the request at its first item, once texts are tokens; a
                request that is not submitted yet is unknown.

        Returns:
            False for a request that is unknown or has finished.

        Raises:
            EngineClosed: the engine was shut down.
            WorkerError: the engine is dead.
        """
        return bool(await self._call(lambda _: self._thread.abort_request(request_id)))

    def reset_prefix_cache(self) -> Awaitable[None]:
        """Drop all cached prefixes, pinned ones included, for requests that are made after this call.

        Returns:
            An awaitable that completes when they are dropped; it raises `WorkerError` if the engine is dead.
        """
        answer = self._put(Engine.reset_prefix_cache)
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it need not be awaited
        return answer

    async def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        cache_salt: str | None = None,
        *,
        tenant: str | None = None,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Keep a prompt's whole blocks in the prefix cache until `unpin_prefix`; compute them first if needed.

        See `LLM.pin_prefix` for arguments, result and errors; a prompt that must be computed needs a slot of the queue,
        like any request.
        """
        options = RequestOptions(cache_salt=cache_salt, tenant=tenant)
        (read,) = await self.texts.prepare([prompt], ONE_TOKEN, add_special_tokens=add_special_tokens)
        asked = await self.adapters.ready(lora_request)
        num_tokens = 0

        def pin(engine: Engine) -> None:
            nonlocal num_tokens
            adapter = acquire_adapter(engine.adapters, asked)
            digest = None if adapter is None else adapter.digest
            num_tokens = engine.pins.pin(name, read.prompt, adapter=digest, cache_salt=cache_salt, tenant=tenant)

        await self._call(pin)
        if not num_tokens:
            async for _ in self.stream(read, ONE_TOKEN, replace(options, lora_request=asked), on_end=pin):
                pass
        if not num_tokens:
            raise WorkerError(f"the prefix {name!r} could not be computed")
        return int(num_tokens)

    async def unpin_prefix(self, name: str, tenant: str | None = None) -> None:
        """Unpin a prefix.

        Raises:
            RequestError: the tenant has no pin of that name.
            WorkerError: the engine is dead.
        """
        await self._call(lambda engine: engine.pins.unpin(name, tenant))

    async def _call(self, run: Callable[[Engine], Any]) -> Any:
        """Run a function in the engine's thread between two steps, and return its result."""
        return await self._put(run)

    def _put(self, run: Callable[[Engine], Any]) -> asyncio.Future[Any]:
        """Queue a function for the engine's thread, between two steps, and return the future of its result."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._thread.put(Call(run, answer))
        # A command that the thread's final drain of the queue missed gets no answer: `has_ended` is set by then.
        if self._thread.has_ended and not answer.done():
            answer.set_exception(self._thread.dead())
        return answer

    # ---- state ----

    async def inspect(self, look: Callable[[Engine], T]) -> T:
        """Run a read-only function in the engine's thread, between two steps, and return its result.

        Raises:
            WorkerError: the engine is dead.
        """
        result: T = await self._call(look)
        return result

    async def has_added(self, request_ids: Sequence[str]) -> bool:
        """Return whether the engine has accepted all of these requests, so that none of them can be refused now.

        Args:
            request_ids: ids given to `generate`.

        Raises:
            WorkerError: the engine is dead.
        """
        return await self.inspect(lambda engine: engine.scheduler.requests.keys() >= set(request_ids))

    def change_mark(self) -> tuple[int, ...]:
        """Return a value that differs from an earlier one if requests or blocks may have changed in between."""
        engine, scheduler = self._engine, self._engine.scheduler
        queues = (scheduler.waiting, scheduler.running, scheduler.swapped, scheduler.requests)
        return (engine.num_steps, scheduler.memory.tables.version, *map(len, queues))

    def swapped_requests(self) -> frozenset[str]:
        """Return the ids of requests with a sequence whose blocks are on the host, possibly in the middle of a step."""
        return frozenset(sequence.request.request_id for sequence in tuple(self._engine.scheduler.swapped))

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config sets."""
        return dict(self._defaults)

    def health(self) -> Health:
        """Return whether the engine makes progress."""
        scheduler = self._engine.scheduler
        since = time.monotonic() - self._thread.progress_s if self._thread.streams else 0.0
        return Health(
            is_alive=self._thread.is_alive,
            is_stuck=since > STUCK_AFTER_S,
            seconds_since_progress=since,
            num_running=len(scheduler.running),
            num_waiting=self._slots.num_waiting,
            num_steps=self._engine.num_steps,
            num_swapped=len(scheduler.swapped),
        )

    def queued_tokens(self) -> int:
        """Return the number of prompt tokens that are not computed yet, possibly in the middle of a step."""
        scheduler = self._engine.scheduler
        sequences = (*scheduler.waiting, *scheduler.running)
        return sum(max(0, sequence.num_prompt - sequence.num_computed) for sequence in sequences)

    @property
    def has_failed(self) -> bool:
        """True once the engine has died of an error; False after a shutdown."""
        return self._thread.failure is not None

    def usage(self) -> Usage:
        """Return the memory manager's counts, possibly in the middle of a step."""
        return self._engine.usage()

    def stats(self) -> EngineStats:
        """Return the engine's totals since the start."""
        return self._engine.stats

    def kv_report(self) -> KvReport:
        """Return the pinned and retained blocks, and the lifetimes of blocks."""
        return KvReport.of(self._engine)

    def kv_event_source(self) -> dict[str, Any] | None:
        """Return the address and format of the engine's KV events; None if it publishes none."""
        return None if self._engine.kv_events is None else self._engine.kv_events.describe()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for requests in progress.

        Returns:
            True if all have ended in time.
        """
        return await self.submitter.drain(timeout_s)

    def shutdown(self) -> None:
        """End every request and the engine's thread, which gets 30 seconds to end its step; may be called twice."""
        self.submitter.is_draining = self.submitter.is_closed = True
        self._thread.shutdown(timeout_s=30)
        self.texts.close()


AsyncLLMEngine = AsyncLLM  # vLLM's name
