"""The messages between a front and the engine's process, in MessagePack.

What may hold any text of clients (parameters, names, errors, arguments and results of calls) is JSON inside, which has
a form for lone surrogates and for integers of any size.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.engine.inputs.tokenized_params import TokenizedParams
from quire.engine.outputs.outputs import RequestMetrics
from quire.memory.results import TokenAccount
from quire.sequences.pooling import Pooling

# Version of these messages, which both ends must share.
VERSION: Final = 4
# A reader refuses a longer message: its length is no length then.
MAX_MESSAGE_BYTES: Final = 1 << 30


class Submit(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A request for the engine."""

    stream: int
    request_id: str
    token_ids: list[int]
    text: str | None
    words: TokenizedParams
    params: str
    options: str
    pooling: Pooling | None
    place: int | None
    arrival_s: float


class AbortStream(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The end of a request that nobody waits for any more."""

    stream: int


class ReserveSlots(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Slots of the waiting queue for several prompts, all or none of which are accepted."""

    place: int
    count: int


class ReleaseSlots(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The end of a reservation; what is left of it is given back."""

    place: int


class Acknowledge(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The arrival of an `Outputs`."""

    busy_s: float


class MethodCall(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A call of a method at the other end; its arguments are a JSON list."""

    number: int
    method: str
    args: str


class MethodResult(msgspec.Struct, array_like=True, tag=6, gc=False):
    """The result of a call as JSON, or its error; see `wire_errors`."""

    number: int
    result: str | None
    error: str | None


class Notice(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A message without an answer: `welcome`, `ready`, `stop`, `failed` or `http_requests`, with JSON."""

    kind: str
    value: str


class LogprobArrays(msgspec.Struct, array_like=True, gc=False):
    """The arrays of a `FlatLogprobs`, as bytes in the machine's order."""

    token_ids: bytes
    logprobs: bytes
    ends: bytes
    ranks: bytes


class SampleRow(msgspec.Struct, array_like=True, gc=False):
    """The delta of one sequence; the fields are those of `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    num_draft_tokens: int
    num_accepted_tokens: int
    cumulative_logprob: float | None
    beam_score: float | None
    logprobs: LogprobArrays | None


class TextRow(msgspec.Struct, array_like=True, tag=0, gc=False):
    """More text of the first sequence of a stream, and nothing else."""

    stream: int
    text: str
    token_ids: list[int]


class DeltaRow(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A delta of a stream; the fields are those of `RequestOutput`, without the prompt, which the front has."""

    stream: int
    outputs: list[SampleRow]
    finished: bool
    prompt_logprobs: LogprobArrays | None
    num_cached_tokens: int
    num_disk_tokens: int
    cache_hit_end: str | None
    cache_differs_at: int | None
    prompt_account: TokenAccount | None
    num_pruned_tokens: int
    pooled: tuple[float, ...]
    error: str | None
    error_code: str | None
    kv_transfer_params: dict[str, Any] | None
    metrics: RequestMetrics


class ErrorRow(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The error that ends a stream; see `wire_errors`."""

    stream: int
    error: str


Row = TextRow | DeltaRow | ErrorRow


class Outputs(msgspec.Struct, array_like=True, tag=8, gc=False):
    """The deltas of a front's streams from one step or several; no stream has two."""

    rows: list[Row]
    streams: list[int] = []
    token_ids: list[list[int]] = []


Message = (
    Submit | AbortStream | ReserveSlots | ReleaseSlots | Acknowledge | MethodCall | MethodResult | Notice | Outputs
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
