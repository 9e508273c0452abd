"""Options of an engine: immutable dataclasses whose values are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

from quire.config.async_scheduling import check_served_async
from quire.config.cache import CacheConfig
from quire.config.checks import (
    GIVEN_ALIKE,
    OWN,
    check_choices,
    check_flag,
    check_positive,
    check_text,
    check_whole,
    choice,
    put_path,
    put_size,
)
from quire.config.cuda_graphs import CudaGraphConfig
from quire.config.hints import drop_neutral, hint_for
from quire.config.lora import LoRAConfig
from quire.config.multimodal import MultimodalConfig
from quire.config.parallel import ParallelConfig, check_num_threads, check_served_by_ranks, check_served_by_stages
from quire.config.speculative import SpeculativeConfig, flatten
from quire.errors import ConfigError, shown

DTYPES = ("auto", "bfloat16", "float16", "float32")
# Other names of dtypes, from vLLM and torch.
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "torch", "triton")
MODEL_IMPLS = ("auto", "native", "transformers")
Quantization = Literal["int8", "int4"]
# Quantisation methods of checkpoints, by vLLM's names; and aliases, vLLM's names of kernels for them.
STORED_METHODS = ("awq", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4")
STORED_NOTE = (
    f"how a checkpoint stores its weights is read from its files, and checked where one of {', '.join(STORED_METHODS)} "
    "is given"
)
STORED_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4"}
WEIGHT_PACKINGS = ("auto", "plain", "lossless")
SANITIZED = ("always", "by-default", "on-request")
POLICIES = ("fcfs", "priority")
PREEMPTION_POLICIES = ("last", "least_waste")
PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and its loading.

    Args:
        model: local folder, Hugging Face hub id, or "bundled" for the model that ships with Quire.
        tokenizer: local folder or hub id of the tokenizer; None takes the model's.
        tokenizer_pre: way in which the tokenizer of a GGUF file divides texts, by llama.cpp's name ("llama-bpe"), for
            files that name none or an unknown one; None takes the file's.
        mmproj: GGUF file of the vision encoder of a model in a GGUF file; None takes the file in the same folder with
            "mmproj" in its name, if there is one. A named one that does not fit the model is an error; a found one is
            left out then.
        skip_tokenizer_init: work on token ids only.
        revision: revision of the model on the hub.
        dtype: dtype of the weights; "auto" keeps the checkpoint's.
        device: device that runs the model; "auto" takes a GPU when there is one.
        max_model_len: maximum number of tokens of prompt and output together; "auto" is the model's own limit, or the
            number of tokens that fit into the KV memory if that is less. None takes "auto".
        served_model_name: name of the model in the server's API, or several, the first of which is in responses; None
            takes `model`.
        chat_template: file with a Jinja chat template to use instead of the model's.
        sanitize_control_tokens: chat messages in which texts of control tokens are encoded as ordinary characters, so
            that only the chat template writes control tokens: "always", "by-default" unless a message has
            `"sanitize_control_tokens": false`, or "on-request" where it has true. Definitions of tools and variables of
            the template have no such field; with "on-request" they may have control tokens.
        generation_config: source of the default sampling parameters: "auto" is the model's generation_config.json,
            "vllm" is no file.
        seed: seed from which the seeds of requests without one are derived.
        num_threads: number of threads of the data plane on a CPU; None takes all cores that this process may use, or
            one for a model so small that more threads are slower.
        kernels: kernel backend: "native" kernels, compiled when Quire was installed, stock "torch" operators, or
            "triton" kernels for NVIDIA GPUs (the extra "gpu"); "auto" takes native kernels on a CPU if they were
            compiled, and Triton kernels on a GPU of compute capability 8.0 or higher if Triton is installed.
        model_impl: implementation of a model: "native" for Quire's own families, "transformers" for the modules of
            transformers (the extra "transformers"), which has many more architectures; "auto" takes a family if there
            is one.
        quantization: quantisation of linear layers while they are loaded (round to nearest): "int8"
            or "int4", with a scale for 32 inputs; with "int4" the output head has six bits. None keeps the weights
            unchanged. Other names of vLLM ("awq", "fp8", ...) set `stored_quantization`.
        stored_quantization: quantisation method that the checkpoint must have; a checkpoint states its method itself,
            and one with another is refused. None takes any.
        weight_packing: layout of the weights of linear layers: "plain", or "lossless" for bfloat16 weights in about
            76 % of their bytes, with bit-identical results; it needs native kernels of level avx2 or better. "auto"
            takes "lossless" if it is possible.
        deterministic: batch invariance: a request's results are bit-identical for any batch, any chunks of its prompt,
            and any mix of computed, cached and recomputed tokens. It needs native kernels, and 16-bit weights or
            `quantization`; models with layers other than attention, or with gated attention, are refused.
        classifier_from_token: tokens for "no" and "yes" of a model that ranks documents by the probability of one of
            them, such as Qwen3-Reranker: "no,yes". None takes the cosine of embeddings.
    """

    model: str = field(default="bundled", metadata=OWN)
    tokenizer: str | None = field(default=None, metadata=OWN)
    tokenizer_pre: str | None = None
    mmproj: str | None = field(default=None, metadata=OWN)
    skip_tokenizer_init: bool = False
    revision: str | None = field(default=None, metadata=OWN)
    dtype: str = choice("auto", DTYPES)
    device: str = choice("auto", DEVICES, OWN)
    max_model_len: int | None = None
    served_model_name: str | Sequence[str] | None = None
    chat_template: str | None = field(default=None, metadata=OWN)
    sanitize_control_tokens: str = choice("always", SANITIZED)
    generation_config: str = choice("auto", ("auto", "vllm"))
    seed: int = 0
    num_threads: int | None = field(default=None, metadata=OWN)
    kernels: str = choice("auto", KERNELS, OWN)
    model_impl: str = choice("auto", MODEL_IMPLS)
    quantization: Quantization | None = field(
        default=None, metadata={"choices": get_args(Quantization), "note": STORED_NOTE}
    )
    stored_quantization: str | None = field(default=None, metadata={"choices": STORED_METHODS})
    weight_packing: str = choice("auto", WEIGHT_PACKINGS)
    deterministic: bool = False
    classifier_from_token: str | None = None

    def __post_init__(self) -> None:
        if self.max_model_len in ("auto", -1):  # vLLM has both
            object.__setattr__(self, "max_model_len", None)
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        method = STORED_ALIASES.get(self.quantization, self.quantization) if isinstance(self.quantization, str) else ""
        if method in STORED_METHODS:
            object.__setattr__(self, "quantization", None)
            object.__setattr__(self, "stored_quantization", method)
        check_choices(self)
        put_path(self, "model")
        put_path(self, "tokenizer", optional=True)
        put_path(self, "chat_template", optional=True)
        put_path(self, "mmproj", optional=True)
        if self.mmproj is not None and self.model_impl == "transformers":
            raise ConfigError(
                f"mmproj must be None with model_impl='transformers', whose models read no images, got {self.mmproj!r}",
                field="mmproj",
            )
        check_text("tokenizer_pre", self.tokenizer_pre, optional=True)
        check_text("revision", self.revision, optional=True)
        names = self.served_model_name
        if isinstance(names, Sequence) and not isinstance(names, str):
            object.__setattr__(self, "served_model_name", tuple(names))
        served: Sequence[object] = self.served_names
        if not all(isinstance(name, str) and name for name in served):
            raise ConfigError(
                f"served_model_name must be a non-empty string, several, or None, got {shown(names)}",
                field="served_model_name",
            )
        check_text("classifier_from_token", self.classifier_from_token, optional=True)
        pair = self.classifier_from_token
        if pair is not None and pair.count(",") != 1:
            raise ConfigError(
                f"classifier_from_token must be two texts with a comma between, got {shown(pair)}",
                field="classifier_from_token",
            )
        check_flag("skip_tokenizer_init", self.skip_tokenizer_init)
        check_flag("deterministic", self.deterministic)
        check_whole("max_model_len", self.max_model_len, 1, optional=True)
        check_whole("num_threads", self.num_threads, 1, optional=True)
        check_whole("seed", self.seed, 0, 2**63 - 1)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model in the server's API; the first is in responses."""
        names = self.served_model_name
        if names is None:
            return (self.model,)
        return names if isinstance(names, tuple) and names else (names,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the scheduler.

    Args:
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step; longer prompts are computed in chunks. None takes
            512 on a CPU and 8192 on a GPU, and at least `max_num_seqs`.
        scheduling_policy: "fcfs", or "priority": lower values first, then first come first served; a request may
            preempt running ones with higher values.
        priority_aging: number of later requests that may overtake a request, for each level by which their priority
            value is lower; prevents starvation.
        preemption_policy: choice of the preempted sequence, among those with a lower place in the order than the one
            that lacks memory: the "last" in order, or "least_waste" (least lost time per freed byte).
        preemption_mode: method of resuming a preempted sequence: "recompute" its tokens, "swap" its blocks to
            `swap_space` and back, or "auto", the cheaper one by the engine's measurements.
        max_queue_len: maximum number of waiting requests; further ones are refused with `QueueFull`. None takes any
            number offline, and 1,024 in `quire serve`.
        max_inter_token_ms: target for the maximum inter-token latency of a stream: while sequences decode, prompts are
            computed in smaller chunks, by measured step times, of at least 16 tokens, and images are encoded in the
            time that steps leave. None sets no target.
        async_scheduling: plan and launch the next step while one runs, before its tokens are read. None does so on a
            GPU, if the other options allow it.
        grammar_timeout_s: time limit for compiling a request's grammar or schema, in seconds.
        grammar_memory_bytes: memory limit for compiling a request's grammar or schema.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = choice("fcfs", POLICIES)
    priority_aging: int = 256
    preemption_policy: str = choice("last", PREEMPTION_POLICIES)
    preemption_mode: str = choice("auto", PREEMPTION_MODES)
    max_queue_len: int | None = None
    max_inter_token_ms: float | None = None
    async_scheduling: bool | None = None
    grammar_timeout_s: float = 5.0
    grammar_memory_bytes: int = 1 << 29

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole("max_num_seqs", self.max_num_seqs, 1)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, optional=True)
        check_whole("priority_aging", self.priority_aging, 1)
        check_whole("max_queue_len", self.max_queue_len, 1, optional=True)
        check_positive("max_inter_token_ms", self.max_inter_token_ms, optional=True)
        if self.async_scheduling is not None:
            check_flag("async_scheduling", self.async_scheduling)
        check_positive("grammar_timeout_s", self.grammar_timeout_s)
        put_size(self, "grammar_memory_bytes", 1 << 24)
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence decodes one token a step; raise the one or lower the other",
                field="max_num_batched_tokens",
            )


PARTS: Final[Mapping[str, Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculative": SpeculativeConfig,
    "lora": LoRAConfig,
    "parallel": ParallelConfig,
    "graphs": CudaGraphConfig,
    "multimodal": MultimodalConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)

    def __post_init__(self) -> None:
        if self.scheduler.preemption_mode == "swap" and not self.cache.swap_space:
            raise ConfigError(
                "preemption_mode 'swap' needs swap_space, which is 0; set swap_space (a few GiB, say), or the mode to "
                "'auto' or 'recompute'",
                field="preemption_mode",
            )
        if self.model.kernels != "auto":  # "auto" depends on the device, and is checked when this is known
            self.graphs.check_kernels(self.model.kernels)
        options = self.to_options()
        check_num_threads(options)
        check_served_by_ranks(options, self.parallel.tensor_parallel_size)
        check_served_by_stages(options, self.parallel.pipeline_parallel_size)
        check_served_async(options)
        if self.lora.merged is not None:
            self._take_name_of(self.lora.merged[0])

    def _take_name_of(self, adapter: str) -> None:
        """Serve the model under the name of the adapter that is merged into it."""
        if self.model.served_model_name is None:
            object.__setattr__(self, "model", replace(self.model, served_model_name=adapter))
        elif self.model.served_names != (adapter,):
            raise ConfigError(
                f"served_model_name names the model, which merge_lora replaces by the adapter {shown(adapter)}: leave "
                "it out; the name is that of lora_modules",
                field="served_model_name",
            )

    def to_options(self) -> dict[str, Any]:
        """Return the flat options from which `from_options` creates an equal configuration."""
        return {name: getattr(getattr(self, part), name) for name, part in option_sections().items()}

    def options_of_ranks(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks of a model.

        They are all options, except those whose fields have the metadata `OWN`: paths of files that the ranks compare
        by their contents, and what differs between hosts. For `GIVEN_ALIKE`, the value is whether the option is given.
        """
        options = self.to_options()
        for item in (item for part in PARTS.values() for item in fields(part)):
            if item.metadata.get("ranks") == OWN["ranks"]:
                del options[item.name]
            elif item.metadata.get("ranks") == GIVEN_ALIKE["ranks"]:
                options[item.name] = options[item.name] is not None
        return options

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Return the configuration of flat options, as given by `LLM(...)` and the command line.

        Args:
            options: fields of the parts; `speculative_config` is a mapping of fields of `SpeculativeConfig`.

        Raises:
            ConfigError: an unknown option (the message lists the known ones), or a value that is not allowed. Options
                of vLLM that do not exist here may have their neutral values; see `OPTION_HINTS`.
        """
        sections = option_sections()
        parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for name, value in drop_neutral(flatten(options)).items():
            if name not in sections:
                raise ConfigError(
                    f"unknown option {shown(name)}{hint_for(name, {}, sections)}; known options are "
                    f"{', '.join(sorted(sections))}",
                    field=name,
                )
            parts[sections[name]][name] = value
        return cls(**{part: PARTS[part](**values) for part, values in parts.items()})


def option_sections() -> dict[str, str]:
    """Return the part of `EngineConfig` that holds each flat option, by the option's name."""
    return {item.name: part for part, cls in PARTS.items() for item in fields(cls)}
