"""Chooses the prefill chunk size that keeps the inter-token latency of running requests below a limit."""

from __future__ import annotations

# Least number of prefill tokens of a step, however slow it is: prompts must make progress.
MIN_CHUNK_TOKENS = 16
# Chunk size before the first measurement.
INITIAL_CHUNK_TOKENS = 64
# Weight of a new measurement in the moving averages.
WEIGHT = 0.25


class ChunkSizeController:
    """Measures the cost of decoding and of prefill tokens, and limits the chunk so that a step takes `limit_s`.

    The model of a step: a constant time for decoding, plus a time per prefill token. The time per token falls as chunks
    grow; it is measured at the chunk sizes that the controller chooses, so both converge together.

    Attributes:
        chunk_tokens: the chunk size.
        reserve_s: least time, in seconds, of other work between two steps; 0 for none. Chunks leave to it half of the
            time that remains beside decoding, or more where half is too short.
    """

    def __init__(self, limit_s: float) -> None:
        self.chunk_tokens = INITIAL_CHUNK_TOKENS
        self.reserve_s = 0.0
        self._limit_s = limit_s
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def record_step(self, num_decoding: int, num_chunk_tokens: int, elapsed_s: float) -> None:
        """Record the duration of a step."""
        if not num_chunk_tokens:
            self._decode_s = moving_average(self._decode_s, elapsed_s, WEIGHT)
        elif num_chunk_tokens >= MIN_CHUNK_TOKENS:
            decode_s = (self._decode_s or 0.0) if num_decoding else 0.0
            token_s = max(elapsed_s - decode_s, 0.0) / num_chunk_tokens
            self._token_s = moving_average(self._token_s, token_s, WEIGHT)
        if self._token_s is None:
            return
        left_s = self._limit_s - (self._decode_s or 0.0)
        if self.reserve_s:
            left_s -= max(left_s / 2, self.reserve_s)
        # At most twice the previous size: larger chunks have not been measured yet.
        limit = 2 * self.chunk_tokens
        fitting = int(left_s / self._token_s) if self._token_s > 0 else limit
        self.chunk_tokens = max(MIN_CHUNK_TOKENS, min(fitting, limit))


def moving_average(average: float | None, sample: float, weight: float) -> float:
    """Return the exponential moving average after a sample; the first sample is the first average."""
    return sample if average is None else average + weight * (sample - average)
