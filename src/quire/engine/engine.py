"""The engine: it accepts requests, runs steps, and returns outputs. One thread owns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from quire.config import ResolvedConfig
from quire.distributed.ranks import Ranks
from quire.engine.adapters import AdapterRegistry, acquire_adapter
from quire.engine.control.encoder_work import EncoderWork
from quire.engine.control.step_recorder import StepRecorder
from quire.engine.inputs.embeddings import EmbeddingsReader
from quire.engine.inputs.images.reader import ImageReader
from quire.engine.inputs.prompts import Prompt, PromptReader
from quire.engine.inputs.request_builder import PreparedRequest, RequestBuilder
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.engine.kv.handover import HandOver
from quire.engine.kv.kv_events import KVEventSource
from quire.engine.kv.pinning import PrefixPins
from quire.engine.metrics.block_lifetimes import BlockLifetimes
from quire.engine.metrics.stats import EngineStats, StepStats
from quire.engine.metrics.stats_collector import StatsCollector
from quire.engine.outputs.beam_steps import BeamSteps
from quire.engine.outputs.early_ends import EarlyEnds
from quire.engine.outputs.output_processor import OutputProcessor
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import NO_TOKEN, InvalidParameter, RequestFailed, WorkerError
from quire.execution.runners.executor import Executor
from quire.memory.usage import Usage
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import LaunchedStep, ScheduledSequence, StepPlan, StepResult
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.params import SamplingParams
from quire.sequences.status import FinishReason
from quire.text.structured.grammar_compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

# The options of a request that has none of its own.
DEFAULT_OPTIONS = RequestOptions()


class StepInFlight(NamedTuple):
    """A step whose results are not applied yet.

    Args:
        plan: its plan.
        step: the launched step, whose result is read once.
        launched_s: time of its launch, on the engine's clock.
    """

    plan: StepPlan
    step: LaunchedStep
    launched_s: float


class Engine:
    """Serves requests from paged memory, one step at a time.

    With a scheduler that plans ahead, the next step is launched before the tokens of the present one are read: up to
    two steps are in flight while `step` runs, and one between two calls. What is copied between the device and a store
    takes its turn behind the step in flight, as all copies do.

    Args:
        config: the resolved configuration.
        scheduler: scheduler, which owns all sequences and calls the memory manager.
        executor: the data plane.
        tokenizer: tokenizer; None if the engine works on token ids only.
        end_token_ids: the model's own end-of-sequence tokens.
        cache_name: identity of the model for the prefix cache.
        clock: seconds, monotonic.
        parts: closes all that was opened for the engine; it is closed with the engine.
        disk_prefetch: loader of blocks on disk; None without a prefix cache there.
        media_reader: reader of prompts' embeddings; None if the data plane accepts none.
        image_reader: reader of prompts' images; None for a model without an encoder of images.
        encoder_work: work of the encoder of images, between steps; None without one.
        speculation: adaptive drafter, updated after each step; None without speculative decoding.
        grammars: compiler of grammars for structured outputs; None if they are unsupported.
        hand_over: hand-over of blocks to and from other engines; None without one.
        adapters: loaded adapters; None without `enable_lora`.
        ranks: ranks that share the model; None for one process.
        kv_events: publication of KV events; None without one.
        can_generate: False where the model has no output head; only pooled requests are taken then.

    Attributes:
        pins: pinned prefixes.
        requests: builder of requests; its `prepare` may be called from any thread.
        outputs: outputs of unfinished requests.
        step_recorder: recorder of the duration of each step.
        block_lifetimes: lifetimes of sampled blocks; None if no blocks are sampled.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        end_token_ids: frozenset[int],
        cache_name: str,
        clock: Callable[[], float] = time.monotonic,
        parts: ExitStack | None = None,
        disk_prefetch: DiskPrefetcher | None = None,
        media_reader: EmbeddingsReader | None = None,
        image_reader: ImageReader | None = None,
        encoder_work: EncoderWork | None = None,
        speculation: AdaptiveDrafter | None = None,
        grammars: GrammarCompiler | None = None,
        hand_over: HandOver | None = None,
        adapters: AdapterRegistry | None = None,
        ranks: Ranks | None = None,
        kv_events: KVEventSource | None = None,
        can_generate: bool = True,
    ) -> None:
        self.config = config
        self.cache_name = cache_name
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self.num_steps = 0
        self._in_flight: StepInFlight | None = None
        self._last_end_s = 0.0
        self.adapters, self.ranks, self.kv_events = adapters, ranks, kv_events
        prompts = PromptReader(
            tokenizer, config.vocab_size, config.max_model_len, media_reader, config.is_encoder, image_reader
        )
        self.pins = PrefixPins(config, scheduler, prompts, cache_name)
        share = config.kv_cache_metrics_sample
        pools = [group.pool for group in scheduler.memory.groups]
        self.block_lifetimes = BlockLifetimes(pools, share, clock) if share else None
        self.requests = RequestBuilder(config, prompts, grammars, end_token_ids, cache_name, can_generate=can_generate)
        self._clock, self._parts = clock, parts or ExitStack()
        self._disk_prefetch = disk_prefetch
        self.grammars, self._encoder_work = grammars, encoder_work
        self._hand_over = hand_over
        self.outputs = OutputProcessor(tokenizer, clock)
        self._num_requests = 0
        self._early_ends = EarlyEnds(scheduler, self.outputs)
        self._beam_steps = BeamSteps(scheduler, self.outputs, clock)
        self._stats = StatsCollector(scheduler)
        copy_bytes_per_s = executor.measure_copies()
        self.step_recorder = StepRecorder(scheduler, copy_bytes_per_s, config.max_inter_token_ms, speculation)

    # ---- requests ----

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | PreparedRequest,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        arrival_s: float | None = None,
    ) -> None:
        """Check a request and queue it.

        Args:
            request_id: unique among the requests that are not finished.
            prompt: text, token ids, or a mapping with one of them; token ids with `media`, see `EmbeddingsReader`. Or
                the result of `requests.prepare` for the prompt and `params`.
            params: valid sampling parameters.
            options: its options; with `final_only` it has one output, once it has ended.
            arrival_s: time of arrival on the engine's clock; None is now.

        Raises:
            RequestError: the request is refused, with the field, the value and the allowed values; nothing is queued.
        """
        if type(request_id) is not str or not request_id:
            raise InvalidParameter("request_id", request_id, "a non-empty string")
        if request_id in self.outputs:
            raise InvalidParameter("request_id", request_id, "unique among the requests in progress")
        asked = options.lora_request
        request, text = self.requests.read(
            request_id,
            prompt,
            params,
            options,
            arrival=self._num_requests,
            can_guess=self.scheduler.drafter is not None,
            adapter=None if asked is None else acquire_adapter(self.adapters, asked),
        )
        self.scheduler.add(request)
        if self._hand_over is not None:
            self._hand_over.add(request, self.scheduler.requests)
        self._num_requests += 1
        arrival_s = self._clock() if arrival_s is None else arrival_s
        self.outputs.add_request(request, text, arrival_s, final_only=options.final_only)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state, and free its memory.

        Returns:
            The last output of the request, None for an unknown or finished request.
        """
        outputs = self._early_ends.end(request_id, FinishReason.ABORT)
        self._finish_when_idle()
        self.publish_kv_events()
        return outputs[0] if outputs else None

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.outputs.states)

    # ---- steps ----

    def step(self, may_hold: Callable[[], bool] | None = None) -> list[RequestOutput]:
        """Run one step and return the outputs of the requests that have any; see `add_request`.

        A failure of the data plane ends the requests of that step with an error, and the others continue, unless the
        device or a rank has failed.

        Args:
            may_hold: function that is called once the step has run. If it returns True, outputs are held in `outputs`
                until the next step, unless one of them is the first of a request, or ends a sample. None: never held.

        Raises:
            WorkerError: the data plane failed in several steps in a row, or its device or a rank has failed.
        """
        try:
            outputs = self._step() + self.outputs.take_outputs(may_hold)
            self._finish_when_idle()
            if self._hand_over is not None and self._disk_prefetch is not None:
                self._hand_over.finish(outputs, self.scheduler.memory, self._disk_prefetch, self.executor)
            return outputs
        finally:
            self.publish_kv_events()

    def _step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that it ended early."""
        if self.adapters is not None:
            self.adapters.free_unused()
        scheduler, work = self.scheduler, self._encoder_work
        if work is not None and (failed := self._early_ends.end_without_image(work.run(self.step_recorder))):
            return failed
        present, self._in_flight = self._in_flight or self._begin(), None
        if present is None:
            self.num_steps += 1
            failed = self._end_without_blocks()
            if self._disk_prefetch is not None and not failed:
                self._disk_prefetch.wait()
            return failed
        if scheduler.plans_ahead and not present.step.has_failed:
            self._begin_loads()
            ahead = scheduler.plan_ahead(self.num_steps, present.plan)
            if ahead is not None:
                self._in_flight = self._launch(ahead)
        failed = self._end_without_blocks() + self._read(present)
        if self._in_flight is None and scheduler.plans_ahead and scheduler.draws_on_device:
            # The device computes while outputs are made of what was read.
            self._in_flight = self._begin()
        return failed

    def usage(self) -> Usage:
        """Return the memory manager's counts."""
        return self.scheduler.memory.usage()

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, pinned ones included; running sequences keep their blocks."""
        self.scheduler.reset_prefix_cache()
        if self._disk_prefetch is not None:
            self._disk_prefetch.reset()
        self.publish_kv_events()

    def publish_kv_events(self) -> None:
        """Publish the KV events since the last call: blocks that the cache has stored or evicted."""
        if self.kv_events is not None:
            self.kv_events.publish_step()

    @property
    def stats(self) -> EngineStats:
        """Totals since the start."""
        stats, stores = self._stats.totals(self.num_steps), self._disk_prefetch
        if stores is not None:
            stats.disk, stats.remote = stores.stats, stores.remote_stats
        if self._hand_over is not None:
            stats.transfer = self._hand_over.stats
        if self._encoder_work is not None:
            stats.images = self._encoder_work.stats
        return stats

    def measure(self) -> StepStats:
        """Return the state of the queues and the memory, and the counters' changes since the last call."""
        return self._stats.measure(self._clock())

    def close(self) -> None:
        """Abort unfinished requests, save the prefix cache to disk, and close all parts, the one opened last first."""
        in_flight, self._in_flight = self._in_flight, None
        try:
            if in_flight is not None:
                try:
                    in_flight.step.result()  # nobody reads it
                except WorkerError:
                    self._early_ends.num_failed_steps += 1  # then nothing is saved
            for request_id in tuple(self.outputs.states):
                self.abort_request(request_id)
            # After a failure of the worker the contents of its blocks are unknown.
            if self._disk_prefetch is not None and not self._early_ends.num_failed_steps:
                self._disk_prefetch.save_all(self.executor, self.scheduler.take_ops(), self._clock)
            self.publish_kv_events()
        finally:
            self._parts.close()

    # ---- parts of a step ----

    def _begin(self) -> StepInFlight | None:
        """Plan and launch a step while none is in flight; return None where nothing can run."""
        self._begin_loads()
        plan = self.scheduler.plan(self.num_steps)
        return self._launch(plan) if plan.items else None

    def _begin_loads(self) -> None:
        """Let blocks be loaded for the next plan."""
        if self._disk_prefetch is not None:
            self._disk_prefetch.begin_step(self.step_recorder.tokens_per_s)

    def _launch(self, plan: StepPlan) -> StepInFlight:
        self.num_steps += 1
        if not isinstance(plan.items, DecodeItems):
            self._mark_scheduled(plan)
        started_s = self._clock()
        return StepInFlight(plan, self.executor.launch(plan), started_s)

    def _read(self, present: StepInFlight) -> list[RequestOutput]:
        """Wait for a step, and apply its results; return the outputs of the requests that it ended early."""
        plan = present.plan
        try:
            result = present.step.result()
        except WorkerError as error:
            if self.ranks is not None:
                raise  # the other ranks are in the middle of the step
            return self._fail(plan, error)
        finally:
            # Steps run one after the other: this one had the device to itself from the end of the last one on.
            overlaps = present.launched_s < self._last_end_s or self._in_flight is not None
            started_s = max(present.launched_s, self._last_end_s)
            self._last_end_s = self._clock()
        self._early_ends.num_failed_steps = 0
        # Tokens that were computed of sequences that had ended are not counted.
        items: Sequence[ScheduledSequence] = plan.items
        if not isinstance(items, DecodeItems) or not self.scheduler.sequences.keys() >= set(items.seq_ids):
            items = [item for item in items if item.seq_id in self.scheduler.sequences]
        if items:
            elapsed_s = self._last_end_s - started_s
            self._stats.computed_tokens += self.step_recorder.record_step(items, elapsed_s, overlaps=overlaps)
            if not isinstance(items, DecodeItems):
                self._count_prompt_tokens(items)
        failed = [] if isinstance(result.items, DecodeResults) else self._check_items(plan, result)
        failed += self._update(plan, result)
        if self._disk_prefetch is not None:
            self._disk_prefetch.write_through(self.executor)
        return failed

    def _fail(self, plan: StepPlan, error: WorkerError) -> list[RequestOutput]:
        """End the requests of a failed step; those of the step launched after it, which read what it wrote, go back."""
        outputs = self._early_ends.fail_step(plan, error)
        later, self._in_flight = self._in_flight, None
        if later is not None:
            with suppress(WorkerError):  # its results mean nothing
                later.step.result()
            self._early_ends.withdraw_step(later.plan)
        if self._disk_prefetch is not None:
            for failed in (plan,) if later is None else (plan, later.plan):
                self._disk_prefetch.drop(failed.ops)
        return outputs

    def _finish_when_idle(self) -> None:
        """Read a step that runs for sequences that have ended, where nothing else is to be done."""
        if self._in_flight is not None and not self.has_unfinished:
            present, self._in_flight = self._in_flight, None
            self._read(present)

    def _end_without_blocks(self) -> list[RequestOutput]:
        """End the requests whose required blocks from another engine have not arrived."""
        prefetch = self._disk_prefetch
        return [] if prefetch is None else self._early_ends.end_without_blocks(prefetch.take_failed())

    def _mark_scheduled(self, plan: StepPlan) -> None:
        """Record the time at which a plan schedules requests for the first time."""
        for item in plan.items:
            if item.new_sequence is not None and item.seq_id in self.scheduler.sequences:
                request = self.scheduler.sequences[item.seq_id].request
                self.outputs.mark_scheduled(request.request_id)

    def _count_prompt_tokens(self, items: Sequence[ScheduledSequence]) -> None:
        """Count the prompt tokens that a step computed, and cached ones before them; each token of a prompt once."""
        for item in items:
            sequence = self.scheduler.sequences[item.seq_id]
            if item.start < sequence.num_prompt:
                metrics = self.outputs.states[sequence.request.request_id].metrics
                num_counted, end = metrics.num_prompt_tokens, item.start + len(item.token_ids)
                metrics.num_prompt_tokens = max(num_counted, min(end, sequence.num_prompt))
                self._stats.prompt_tokens += metrics.num_prompt_tokens - num_counted

    def _check_items(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """End the requests of failed items, and collect the prompt log probabilities of the others."""
        failed: list[RequestOutput] = []
        for item, outcome in zip(plan.items, result.items, strict=True):
            if outcome.error is not None:
                failed += self._early_ends.fail_item(item, outcome.error, is_own_fault=outcome.is_own_fault)
            elif outcome.prompt_logprobs and item.seq_id in self.scheduler.sequences:
                self.outputs.add_prompt_logprobs(self.scheduler.sequences[item.seq_id], item, outcome)
        return failed

    def _update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append a step's tokens to sequences and outputs, and finish complete sequences."""
        scheduler, outputs = self.scheduler, self.outputs
        num_generated, stopped, failures = outputs.add_tokens(
            scheduler.update_from_results(plan.items, result.items), result.items
        )
        self._stats.generation_tokens += num_generated
        for sequence, stop in stopped:
            scheduler.finish_at_stop_string(sequence, stop)
        failed: list[RequestOutput] = []
        for request_id, error in failures:
            failed += self._early_ends.end(request_id, FinishReason.ERROR, error, RequestFailed.code)
        if plan.beams:
            advanced = self._beam_steps.advance(plan.beams, result.beams)
            self._stats.generation_tokens += advanced.num_generated
            for request_id in advanced.exhausted:
                failed += self._early_ends.end(request_id, FinishReason.ERROR, NO_TOKEN)
        return failed
