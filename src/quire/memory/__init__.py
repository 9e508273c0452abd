"""Memory: the KV cache manager and its block pools. Standard library only; usable on its own."""

from quire.memory.invariants import check
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.memory.prefix.token_chain import Namespace, TokenChain
from quire.memory.results import (
    NO_OPS,
    AllocStatus,
    BlockCopy,
    BlockLoad,
    HitEnd,
    MemoryOps,
    PrefixHit,
    TableDelta,
    Tier,
    TokenAccount,
    TokenSources,
    Verdict,
)
from quire.memory.specs import ChunkedLocal, FullAttention, KVCacheSpec, RecurrentState, SlidingWindow
from quire.memory.tiers.swap import SwapSize
from quire.memory.usage import GroupUsage, HostUsage, Usage

__all__ = [
    "NO_OPS",
    "AllocStatus",
    "BlockCopy",
    "BlockLoad",
    "ChunkedLocal",
    "FullAttention",
    "GroupUsage",
    "HitEnd",
    "HostUsage",
    "KVCacheManager",
    "KVCacheSpec",
    "MediaSpan",
    "MemoryOps",
    "Namespace",
    "PrefixHit",
    "RecurrentState",
    "SlidingWindow",
    "SwapSize",
    "TableDelta",
    "Tier",
    "TokenAccount",
    "TokenChain",
    "TokenSources",
    "Usage",
    "Verdict",
    "check",
]
