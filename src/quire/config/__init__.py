"""Configuration: options of the user, properties of machine and model, and the resolved configuration."""

from quire.config.cache import EVICTION_POLICIES, KV_CACHE_DTYPES, CacheConfig
from quire.config.cache_dtypes import CACHE_DTYPES, CacheDtype
from quire.config.cuda_graphs import CudaGraphConfig
from quire.config.kv_events import KVEventsConfig
from quire.config.lora import LoRAConfig
from quire.config.multimodal import MultimodalConfig
from quire.config.options import (
    DTYPES,
    PREEMPTION_MODES,
    PREEMPTION_POLICIES,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    option_sections,
)
from quire.config.parallel import ParallelConfig
from quire.config.probed import Machine, ModelFacts, StepCost
from quire.config.resolved import (
    GIB,
    ResolvedConfig,
    capture_sizes,
    context_length,
    piece_sizes,
    pool_blocks,
    resolve,
    step_tokens,
    sufficient_blocks,
)
from quire.config.speculative import SpeculativeConfig

__all__ = [
    "CACHE_DTYPES",
    "DTYPES",
    "EVICTION_POLICIES",
    "GIB",
    "KV_CACHE_DTYPES",
    "PREEMPTION_MODES",
    "PREEMPTION_POLICIES",
    "CacheConfig",
    "CacheDtype",
    "CudaGraphConfig",
    "EngineConfig",
    "KVEventsConfig",
    "LoRAConfig",
    "Machine",
    "ModelConfig",
    "ModelFacts",
    "MultimodalConfig",
    "ParallelConfig",
    "Quantization",
    "ResolvedConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StepCost",
    "capture_sizes",
    "context_length",
    "option_sections",
    "piece_sizes",
    "pool_blocks",
    "resolve",
    "step_tokens",
    "sufficient_blocks",
]
