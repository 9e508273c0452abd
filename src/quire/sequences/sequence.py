"""A sequence: one token stream being decoded."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from quire.errors import InvariantViolation
from quire.memory.chain import TokenChain

if TYPE_CHECKING:
    from quire.sequences.edits import Append
    from quire.sequences.request import Request
    from quire.sequences.strategy import Strategy


class SequenceStatus(Enum):
    """Where a sequence is. It moves as `TRANSITIONS` allow (S5)."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.SWAPPED, SequenceStatus.FINISHED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    # Of a beam that was given up: no client sees it.
    DROPPED = "dropped"


class Sequence:
    """One token stream.

    ```
     tokens   |<-- prompt -->|<-- output -->|
              |<-- num_computed -->|<-- num_pending -->|
    ```

    Args:
        seq_id: unique in the engine.
        request: its owner.
        sample_idx: which of the request's samples it is.
        tokens: prompt and output; owned here, referenced by `chain`.
        chain: the identities of its blocks.
        strategy: how its request is decoded.
        usual: what that says of a token that comes alone and does not end the sequence, whatever else; None where it is
            to be asked each time.

    Attributes:
        num_computed: tokens whose KV is stored.
        draft: tokens that may come next, which the step that is planned verifies.
        num_drafted, num_accepted: drafts that were verified so far, and those of them that were right.
        is_open: True when the data plane knows the sequence.
        is_staged: True once what is on disk of its prompt was brought up, or found not to be worth that.
        staged: places in its chain of the blocks that were.
        num_prompt: tokens of the prompt.
        max_tokens: with so many it ends.
        end_ids: with any of these it may end, by the request's rules.
        key: its place in every queue: the smaller, the earlier.
    """

    __slots__ = (
        "chain",
        "draft",
        "end_ids",
        "finish_reason",
        "is_open",
        "is_staged",
        "key",
        "max_tokens",
        "num_accepted",
        "num_computed",
        "num_drafted",
        "num_prompt",
        "request",
        "sample_idx",
        "seq_id",
        "staged",
        "status",
        "stop_reason",
        "strategy",
        "tokens",
        "usual",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        sample_idx: int,
        tokens: list[int],
        chain: TokenChain,
        key: tuple[int, int, int],
        strategy: Strategy,
        usual: Append | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample_idx = sample_idx
        self.tokens = tokens
        self.chain = chain
        self.key = key
        self.strategy = strategy
        self.usual = usual
        self.num_prompt = request.num_prompt
        self.max_tokens = request.max_total_tokens
        self.end_ids = request.end_ids
        self.num_computed = 0
        self.draft: tuple[int, ...] = ()
        self.num_drafted = 0
        self.num_accepted = 0
        self.is_open = False
        self.is_staged = False
        self.staged: set[int] = set()
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens still to run through the model before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def is_beam(self) -> bool:
        """True for one of the beams of a search, which advance, lose their memory and come back together."""
        return self.request.search is not None and len(self.tokens) > self.num_prompt

    @property
    def is_finished(self) -> bool:
        """True when no more tokens will come."""
        return self.status is SequenceStatus.FINISHED

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status.

        Raises:
            InvariantViolation: S5, a change that is not allowed.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvariantViolation("S5", f"sequence {self.seq_id}: {self.status.value} to {status.value}")
        self.status = status
