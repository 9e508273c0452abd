"""Ray Serve's autoscaling by the tokens of the prompts that wait: they are what the next request waits for."""

from __future__ import annotations

from typing import Any

# Calls in a row with empty queues after which a replica is given back.
MIN_QUIET = 10


class QueuedTokensPolicy:
    """Asks for a replica more for each so many waiting tokens, and gives one back after a while without any.

    Args:
        queued_tokens: waiting tokens, of all replicas together, that are worth a replica more.
    """

    def __init__(self, queued_tokens: int) -> None:
        self._queued_tokens = queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what the next call gets as its state.

        Args:
            context: Ray Serve's `AutoscalingContext`, with the values of `record_autoscaling_stats`.
        """
        queued = sum((context.aggregated_metrics or {}).get("queued_tokens", {}).values())
        present = max(1, context.current_num_replicas)
        wanted, num_quiet = present + int(queued // self._queued_tokens), 0
        if not queued and not context.total_num_requests:
            num_quiet = (context.policy_state or {}).get("num_quiet", 0) + 1
            if num_quiet >= MIN_QUIET:
                wanted, num_quiet = present - 1, 0
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {"num_quiet": num_quiet}
