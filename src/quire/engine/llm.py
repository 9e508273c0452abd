"""The offline interface: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

from quire.config import EngineConfig, ResolvedConfig
from quire.engine.adapters import Adapters, acquire_adapter, adapters_of
from quire.engine.engine import Engine
from quire.engine.exporters.kv_report import KvReport
from quire.engine.inputs.prompt_names import naming_conversation, naming_prompt, prompt_name
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.kv.pinning import ONE_TOKEN
from quire.engine.metrics.stats import EngineStats
from quire.engine.outputs.beam_search import BeamSearchOutput, BeamSearchParams, beam_outputs
from quire.engine.outputs.chat import add_calls, add_reasoning, explained, with_calls, with_reasoning
from quire.engine.outputs.outputs import OutputCollector, RequestOutput
from quire.engine.pooled_llm import PooledLLM, as_conversations, as_prompts, priorities_of
from quire.engine.startup.start import load
from quire.errors import ConfigError, EngineClosed, InvalidParameter, UnsupportedFeature, WorkerError
from quire.memory.usage import Usage
from quire.platform.heap import frozen_heap
from quire.sequences.lora import LoRARequest
from quire.sequences.params import SamplingParams
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.chat_template import ChatTemplate, require_chat_template
from quire.text.reasoning import ReasoningModel
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls import ToolModel

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class LLM(PooledLLM):
    """A model and its engine, in this process; not thread-safe.

    `with LLM(...) as llm:` closes it at the end of the block. A closed one raises `EngineClosed`.

    Args:
        model: a local folder, a Hugging Face hub id, or "bundled".
        options: fields of the parts of `EngineConfig` (`ModelConfig`, `CacheConfig`, `SchedulerConfig`,
            `SpeculativeConfig`, `LoRAConfig`, `ParallelConfig`, `CudaGraphConfig`): `dtype`, `max_model_len`,
            `block_size`, `num_kv_blocks`, `max_num_seqs`, `enable_prefix_caching`, `skip_tokenizer_init`, `seed`, ...

    Raises:
        ConfigError: an option or a checkpoint that cannot be honoured.
    """

    def __init__(self, model: str | PathLike[str] = "bundled", **options: Any) -> None:
        loaded = load(EngineConfig.from_options(model=model, **options))
        self.engine: Engine = loaded.engine
        self.pooling = loaded.pooling
        self.model_name = loaded.name
        self._default_params = loaded.default_params
        self._is_closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ConfigError: the engine has none, because of `skip_tokenizer_init`.
        """
        if self.tokenizer is None:
            raise ConfigError("this engine has no tokenizer: skip_tokenizer_init is set", field="skip_tokenizer_init")
        return self.tokenizer

    @property
    def resolved(self) -> ResolvedConfig:
        """The resolved configuration."""
        return self.engine.config

    @property
    def stats(self) -> EngineStats:
        """Totals since the start."""
        return self.engine.stats

    def usage(self) -> Usage:
        """Return the memory manager's counts."""
        return self.engine.usage()

    def kv_report(self) -> KvReport:
        """Return the pinned and retained blocks, and the lifetimes of blocks."""
        return KvReport.of(self.engine)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, pinned ones included."""
        self._check_open()
        self.engine.reset_prefix_cache()

    def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        cache_salt: str | None = None,
        *,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Keep a prompt's whole blocks in the prefix cache until `unpin_prefix`; compute them first if needed.

        Args:
            name: name of the pin; not in use by this tenant.
            prompt: text, token ids, or `{"prompt_token_ids": [...]}`; at least a block long.
            cache_salt, tenant, lora_request: values of the requests that can hit the prefix.

        Returns:
            The number of pinned tokens.

        Raises:
            RequestError: a name in use, a prompt shorter than a block, more than `pin_limit` allows (`PinLimitReached`,
                with both numbers), or an engine without a `pin_limit` or without prefix caching.
            WorkerError: the prompt could not be computed.
        """
        self._check_open()
        options: dict[str, Any] = {"cache_salt": cache_salt, "tenant": tenant}
        adapter = acquire_adapter(self.engine.adapters, lora_request)
        digest = None if adapter is None else adapter.digest
        pin = partial(self.engine.pins.pin, name, prompt, adapter=digest, **options)
        if not (num_tokens := pin()):
            list(self._run(prompt, ONE_TOKEN, RequestOptions(**options), lora_request))
            num_tokens = pin()
        if not num_tokens:
            raise WorkerError(f"the prefix {name!r} could not be computed")
        return num_tokens

    def unpin_prefix(self, name: str, tenant: str | None = None) -> None:
        """Unpin a prefix.

        Raises:
            RequestError: the tenant has no pin of that name.
        """
        self._check_open()
        self.engine.pins.unpin(name, tenant)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation config."""
        return SamplingParams(**self._default_params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        retain_cache: bool = False,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once.

        Args:
            prompts: one prompt or several: text, token ids, or `{"prompt_token_ids": [...]}`. The latter may have
                `"media": [{"offset": ..., "embeddings": ...}, ...]`: tensors [tokens, E] of the model's dtype, which
                replace the embeddings of the tokens from `offset` on. A prompt of a model that reads images may have
                `"multi_modal_data": {"image": [...]}`: bytes of files, `Path`s, or images of Pillow, one for each
                placeholder in the text or the token ids.
            sampling_params: parameters of all prompts, or one object for each; None takes the model's own.
            use_tqdm: show a progress bar on standard error, if it is a terminal.
            cache_salt, tenant: only requests with equal values of both share cached prefixes.
            retain_cache: True to evict the requests' cached blocks last, within `retention_limit`.
            lora_request: adapter of all prompts, or a list with one, or None, for each; None for the model alone.
            priority: priority of all prompts, or a list of one for each; lower runs first, under the scheduling
                policy "priority"; under "fcfs" it must be 0.

        Returns:
            One output for each prompt, in their order. A request that failed is logged at level ERROR; its outputs
            have the finish reason "error", and its `error` and `error_code` say why.

        Raises:
            RequestError: a prompt or parameter is refused, and nothing runs; the field names one of several prompts.
        """
        # A pass of the garbage collector over torch's objects can take as long as a step of a GPU.
        is_on_gpu = self.resolved.device != "cpu"
        with frozen_heap(is_wanted=is_on_gpu), ProgressBar(is_shown=use_tqdm) as progress:
            outputs: list[RequestOutput] = []
            options = RequestOptions(cache_salt=cache_salt, tenant=tenant, retain_cache=retain_cache, final_only=True)
            for output in self._run(prompts, sampling_params, options, lora_request, priority, progress.start):
                outputs.append(output)
                progress.advance(output)
        for output in outputs:
            if output.error is not None:
                logger.error("request %s failed (%s): %s", output.request_id, output.error_code, output.error)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        tenant: str | None = None,
        retain_cache: bool = False,
        lora_request: Adapters = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists. For a model that reads images,
                parts of the content may be `{"type": "image", "image": ...}` with bytes of a file, a `Path` or an image
                of Pillow, or `{"type": "image_url", "image_url": {"url": ...}}`.
            sampling_params: see `generate`.
            use_tqdm, cache_salt, tenant, retain_cache, lora_request: see `generate`.
            tools: functions that the model may call, as in OpenAI's API; outputs then have `content` and `tool_calls`.
            tool_choice: "auto" (or None), "required", "none", or an object that names the allowed tools.
            parallel_tool_calls: False allows at most one call.
            tool_call_parser: see `ToolModel.find`.
            reasoning_parser: see `ReasoningModel.find`; "none" leaves thinking in the text only. Otherwise the
                outputs of a model that thinks have `reasoning` and `content`.
            template_args: see `render_chat`.

        Raises:
            RequestError: messages that the template refuses, a model without a template, or unsupported tools.
        """
        self._check_open()
        model = ToolModel.find(tool_call_parser, self.tokenizer, self.resolved.vocab_size)
        use = model.read(tools, tool_choice, parallel_tool_calls)
        if use is not None:
            template_args["tools"] = use.definitions
        conversations, prompts = as_conversations(messages), list[Any]()
        for idx, conversation in enumerate(conversations):
            with naming_conversation(idx, len(conversations)):
                rendered = self._chat_prompt(conversation, **template_args)
                prompts.append(self.engine.requests.prepare(rendered, ONE_TOKEN, add_special_tokens=False).prompt)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "cache_salt": cache_salt, "tenant": tenant}
        options |= {"retain_cache": retain_cache, "lora_request": lora_request}
        template = self._template(template_args.get("chat_template"))
        ends = self.engine.requests.end_token_ids
        thinking = ReasoningModel.find(reasoning_parser, self.tokenizer, ends, template)
        all_params = with_reasoning(self._params_of(sampling_params, len(prompts)), thinking)
        asked = all_params if use is None else [with_calls(one, use) for one in all_params]
        try:
            outputs = self.generate(prompts, asked, **options)
        except InvalidParameter as error:
            raise error if use is None else explained(error, use, all_params, asked) from error
        add_reasoning(outputs, thinking)
        if use is not None:
            add_calls(outputs, use, conversations)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely outputs of each prompt, best first.

        Raises:
            RequestError: a prompt or parameter that is refused, or a request that failed.
        """
        return beam_outputs(self.generate(prompts, params.as_sampling(), use_tqdm=use_tqdm, lora_request=lora_request))

    def render_chat(self, messages: Messages, **template_args: Any) -> list[int]:
        """Return the token ids of a conversation, by default ready for the assistant's turn.

        Args:
            template_args: arguments of `ChatTemplate.prompt`: `add_generation_prompt`, `continue_final_message` and
                `tools`; `chat_template`, the source of another template; `chat_template_kwargs`, its variables, ignored
                with one warning if it does not use them; or such variables, which are refused then.
        """
        prompt = self._chat_prompt(messages, **template_args)
        if prompt.images:
            return self.engine.requests.prepare(prompt, ONE_TOKEN, add_special_tokens=False).prompt.token_ids
        return self.get_tokenizer().encode(prompt, add_special_tokens=False)

    def _chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        self._check_open()
        tokenizer = self._require_tokenizer()
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise InvalidParameter("chat_template_kwargs", chat_template_kwargs, "a mapping or None")
        template = require_chat_template(self._template(chat_template))
        form = template.for_tools if tools else template
        # A keyword may be a misspelt argument, which is refused; programs send the others to models of all kinds.
        used = form.used_variables(chat_template_kwargs or {})
        return form.prompt(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**used, **variables},
            added_tokens=tokenizer.added_tokens,
            sanitizing=self.resolved.sanitize_control_tokens,
            max_images=self.engine.requests.max_images,
        )

    def _template(self, source: object) -> ChatTemplate | None:
        """Return the template with a source, None for the model's own."""
        tokenizer = self._require_tokenizer()
        return tokenizer.chat_template if source is None else tokenizer.make_chat_template(source)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedFeature("messages", "this engine runs without a tokenizer")
        return self.tokenizer

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        retain_cache: bool = False,
        lora_request: Adapters = None,
    ) -> Iterator[RequestOutput]:
        """Generate for all prompts at once, yielding each step's deltas, or the outputs that `output_kind` selects.

        Leaving the iteration early aborts unfinished requests. An output's `request_id` is the prompt's index as a
        decimal number. One iteration at a time: end or close one before the next call. See `generate` for the
        arguments.

        Raises:
            RequestError: a prompt or parameter that is refused, or an earlier stream that has not ended; nothing runs.
        """
        many = as_prompts(prompts)
        all_params = self._params_of(sampling_params, len(many))
        collectors: dict[int, OutputCollector] = {}
        options = RequestOptions(cache_salt=cache_salt, tenant=tenant, retain_cache=retain_cache)
        with closing(self._run(many, all_params, options, lora_request)) as deltas:
            for delta in deltas:
                index = int(delta.request_id)
                if index not in collectors:
                    collectors[index] = OutputCollector(all_params[index].output_kind)
                output = collectors[index].add(delta)
                if output is not None:
                    yield output

    def close(self) -> None:
        """Abort unfinished requests, and free weights and KV memory; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("this LLM was closed; make another one")

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        options: RequestOptions,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        on_start: Any = None,
    ) -> Generator[RequestOutput, None, None]:
        """Queue all prompts, or none, then step until they have finished; each has its own adapter and priority."""
        self._check_open()
        self._check_idle()
        many = as_prompts(prompts)
        all_params = self._params_of(params, len(many))
        adapters = adapters_of(lora_request, len(many))
        levels = priorities_of(priority, len(many), self.resolved)
        queued: list[str] = []
        try:
            for idx, (prompt, wanted, adapter, level) in enumerate(
                zip(many, all_params, adapters, levels, strict=True)
            ):
                with naming_prompt(prompt_name(idx, len(many))):
                    request_options = replace(options, lora_request=adapter, priority=level)
                    self.engine.add_request(str(idx), prompt, wanted, request_options)
                queued.append(str(idx))
            if on_start is not None:
                on_start(sum(wanted.n for wanted in all_params))
            while self.engine.has_unfinished:
                yield from self.engine.step()
        finally:
            for name in queued:
                self.engine.abort_request(name)

    def _params_of(self, params: Params, count: int) -> Sequence[SamplingParams]:
        """Return one set of parameters for each prompt."""
        sampling_params = self.get_default_sampling_params() if params is None else params
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, list | tuple) or len(sampling_params) != count:
            allowed = f"SamplingParams, or a list of one for each of {count} prompts"
            raise InvalidParameter("sampling_params", sampling_params, allowed)
        return sampling_params


class ProgressBar:
    """A progress bar over finished sequences, or nothing."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: Any = None
        self._num_tokens = 0
        self._task: Any = None
        # Standard output is the program's own; without a terminal, a bar is noise.
        if is_shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("Generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[num_tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int) -> None:
        """Start the bar with the number of sequences."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, num_tokens=0)

    def advance(self, ended: RequestOutput) -> None:
        """Add the output of a request that has ended."""
        if self._bar is not None:
            self._num_tokens += sum(len(output.token_ids) for output in ended.outputs)
            finished = sum(output.finished for output in ended.outputs)
            self._bar.update(self._task, advance=finished, num_tokens=self._num_tokens)
