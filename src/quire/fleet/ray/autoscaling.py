"""Autoscaling of replicas by their waiting and running work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Metrics of a replica: tokens of prompts that are not computed yet, and running sequences.
QUEUED_TOKENS: Final = "queued_tokens"
RUNNING: Final = "running_sequences"


class QueuedTokensPolicy:
    """Serve's policy: enough replicas for the targets of queued tokens and of running sequences per replica.

    Serve applies the limits, factors and delays of `autoscaling_config` to the result.
    """

    def __init__(self, target_queued_tokens: int, target_running: int) -> None:
        self._targets = {QUEUED_TOKENS: target_queued_tokens, RUNNING: target_running}

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        if not any(metrics.get(name) for name in self._targets):  # no replica has reported yet
            return float(context.target_num_replicas), {}
        shares = (sum(metrics.get(name, {}).values()) / target for name, target in self._targets.items())
        return max(shares), {}
