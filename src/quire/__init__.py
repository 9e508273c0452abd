"""Quire serves large language models from paged memory.

In three lines:

    from quire import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config.cache import CacheConfig
    from quire.config.cuda_graphs import CudaGraphConfig
    from quire.config.lora import LoRAConfig
    from quire.config.options import EngineConfig, ModelConfig, SchedulerConfig
    from quire.config.parallel import ParallelConfig
    from quire.config.speculative import SpeculativeConfig
    from quire.engine.async_engine_args import AsyncEngineArgs
    from quire.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.engine.llm import LLM
    from quire.engine.outputs.beam_search import BeamSearchOutput, BeamSearchParams
    from quire.engine.outputs.logprobs import Logprob
    from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
    from quire.engine.outputs.pooled_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        TokenClassificationOutput,
        TokenClassificationRequestOutput,
    )
    from quire.errors import (
        CheckpointError,
        ConfigError,
        EngineClosed,
        InvalidAdapter,
        InvalidParameter,
        PinLimitReached,
        PromptTooLong,
        QueueFull,
        QuireError,
        RankFailed,
        RequestError,
        RequestFailed,
        UnknownParameter,
        UnsupportedFeature,
        UnsupportedModel,
        WorkerError,
    )
    from quire.sequences.decoding.strategies import Sampling
    from quire.sequences.lora import LoRARequest
    from quire.sequences.params import RequestOutputKind, SamplingParams
    from quire.sequences.pooling import PoolingParams
    from quire.sequences.status import FinishReason
    from quire.sequences.strategy import Append, Fail, Finish, Fork, Strategy, Truncate
    from quire.sequences.structured import StructuredOutputs, StructuredOutputsParams
    from quire.text.tool_calls import ToolCall

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Append",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CacheConfig",
    "CheckpointError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "CudaGraphConfig",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineClosed",
    "EngineConfig",
    "Fail",
    "Finish",
    "FinishReason",
    "Fork",
    "InvalidAdapter",
    "InvalidParameter",
    "LoRAConfig",
    "LoRARequest",
    "Logprob",
    "ModelConfig",
    "ParallelConfig",
    "PinLimitReached",
    "PoolingParams",
    "PromptTooLong",
    "QueueFull",
    "QuireError",
    "RankFailed",
    "RequestError",
    "RequestFailed",
    "RequestOutput",
    "RequestOutputKind",
    "Sampling",
    "SamplingParams",
    "SchedulerConfig",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpeculativeConfig",
    "Strategy",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TokenClassificationOutput",
    "TokenClassificationRequestOutput",
    "ToolCall",
    "Truncate",
    "UnknownParameter",
    "UnsupportedFeature",
    "UnsupportedModel",
    "WorkerError",
    "__version__",
]

# Module -> the names that `quire` exports from it; importing `quire` imports none of them.
_EXPORTS = {
    "config.lora": ("LoRAConfig",),
    "config.cache": ("CacheConfig",),
    "config.cuda_graphs": ("CudaGraphConfig",),
    "config.options": ("EngineConfig", "ModelConfig", "SchedulerConfig"),
    "config.parallel": ("ParallelConfig",),
    "config.speculative": ("SpeculativeConfig",),
    "sequences.decoding.strategies": ("Sampling",),
    "engine.async_engine_args": ("AsyncEngineArgs",),
    "engine.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "engine.outputs.beam_search": ("BeamSearchOutput", "BeamSearchParams"),
    "engine.llm": ("LLM",),
    "engine.outputs.logprobs": ("Logprob",),
    "engine.outputs.outputs": ("CompletionOutput", "RequestOutput"),
    "engine.outputs.pooled_outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
        "TokenClassificationOutput",
        "TokenClassificationRequestOutput",
    ),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "EngineClosed",
        "InvalidAdapter",
        "InvalidParameter",
        "PinLimitReached",
        "PromptTooLong",
        "QueueFull",
        "QuireError",
        "RankFailed",
        "RequestError",
        "RequestFailed",
        "UnknownParameter",
        "UnsupportedFeature",
        "UnsupportedModel",
        "WorkerError",
    ),
    "sequences.lora": ("LoRARequest",),
    "sequences.params": ("RequestOutputKind", "SamplingParams"),
    "sequences.pooling": ("PoolingParams",),
    "sequences.status": ("FinishReason",),
    "sequences.strategy": ("Append", "Fail", "Finish", "Fork", "Strategy", "Truncate"),
    "sequences.structured": ("StructuredOutputs", "StructuredOutputsParams"),
    "text.tool_calls": ("ToolCall",),
}
_HOMES = {name: f"quire.{module}" for module, names in _EXPORTS.items() for name in names}

# Quire does not need numpy, so it is not installed; torch warns about that when it is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


def __getattr__(name: str) -> Any:
    # Exports are looked up on first use, so that the control plane can be imported without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
