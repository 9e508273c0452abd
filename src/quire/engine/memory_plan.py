"""What is asked of a plan of KV memory, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be planned.

    Args:
        config: the engine's options.
        memory_bytes: the whole machine's memory, or its GPU's; None where only the cache's size counts.
        weights_bytes: what the weights take of it, those of a draft model included; None estimates it.
        lengths: tokens of sequences to look at; empty takes `LENGTHS`.
    """

    config: EngineConfig
    memory_bytes: int | None = None
    weights_bytes: int | None = None
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "weights_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if self.weights_bytes is not None and self.memory_bytes is None:
            raise ConfigError(
                "weights_bytes is taken off memory, which is not given: add --memory", field="weights_bytes"
            )

    @property
    def has_budget(self) -> bool:
        """True when something says how many bytes the cache has."""
        cache = self.config.cache
        return any(each is not None for each in (self.memory_bytes, cache.kv_cache_memory_bytes, cache.num_kv_blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One cache group.

    Args:
        kind: what its layers keep.
        is_draft: they are those of the draft model.
        bytes_per_token, bytes_per_block: all its layers; None for a state, which no token adds to.
        bytes_per_sequence: of a state; None for blocks.
        num_blocks: blocks, or states, if the group had the whole arena; None without a budget.
    """

    kind: str
    is_draft: bool
    num_layers: int
    bytes_per_token: int | None
    bytes_per_block: int | None
    bytes_per_sequence: int | None
    num_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Sequences of one length.

    Args:
        sequence_bytes: the most that one holds on its way there.
        concurrency: how many run at once, `max_num_seqs` at most; None without a budget.
    """

    num_tokens: int
    sequence_bytes: int
    concurrency: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What another value of one option would change.

    Args:
        option: as it is typed.
        bytes_per_token: all groups.
        sequence: of `max_model_len` tokens, with that option.
        longest: the longest sequence that fits; None without a budget.
    """

    option: str
    bytes_per_token: int
    sequence: LengthPlan
    longest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV memory of a model, and of a draft model that guesses for it; bytes everywhere.

    Args:
        origin: who read the configuration: "family", or "generic fields".
        draft_model, draft_architecture, draft_origin: the same of the draft model; None without one.
        groups: the cache groups, those of blocks first; then those of the draft model.
        bytes_per_token: all groups, while no block has died.
        weights_bytes: of the weights of both; None where it does not matter.
        arena_bytes: of the cache, null blocks included; None without a budget, as for the next two.
        longest: the longest sequence that fits, prompt and output together, at most `max_model_len`.
        never: which prompts never fit, and why.
        sequence_bytes: the most that a sequence holds on its way to `max_model_len` tokens.
        full_bytes: what it would hold if all attention kept all tokens.
        paged_bytes: what it would hold in pages of one size for all groups instead of slabs.
        alignment_loss: share of a slab that blocks of the group that fits worst leave over.
        notes: what the numbers rest on.
    """

    model: str
    architecture: str
    origin: str
    draft_model: str | None
    draft_architecture: str | None
    draft_origin: str | None
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    weights_bytes: int | None
    is_weights_estimate: bool
    arena_bytes: int | None
    longest: int | None
    never: str | None
    lengths: tuple[LengthPlan, ...]
    sequence_bytes: int
    full_bytes: int
    paged_bytes: int
    alignment_loss: float
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True unless a sequence of `max_model_len` tokens is too much for the budget."""
        return self.longest is None or self.longest == self.max_model_len
