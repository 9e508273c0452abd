"""Options that pipeline parallelism does not support."""

from __future__ import annotations

from typing import Any, Final

from quire.config.checks import check_served

# Options with the values that are supported with pipeline stages, and the reason why others are not.
_SERVED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "speculative_method": (("off", "ngram", "suffix"), "models that make drafts are not divided into stages"),
    "prefix_cache_write_policy": ((None, "write_back"), "blocks go to disk in the order of plans, not as requests end"),
    **dict.fromkeys(
        ("prefix_cache_url", "kv_transfer_config"),
        ((None,), "blocks from elsewhere would be loaded at other times on each rank"),
    ),
    "max_inter_token_ms": ((None,), "a step is one of several between two tokens of a request"),
    "device": (("auto", "cpu"), "stages exchange hidden states between CPUs"),
    "all_reduce_backend": (("auto", "shared_memory", "gloo"), "NCCL is for GPUs"),
}


def check_served_by_stages(options: dict[str, Any], size: int) -> None:
    """Refuse options that are not supported with pipeline stages."""
    if size > 1:
        check_served(options, _SERVED, "pipeline_parallel_size above 1")
