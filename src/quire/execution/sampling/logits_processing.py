"""The logits processing of a request before a token is chosen, in this order:

1. `structured_outputs`, `allowed_token_ids`, `logit_bias`, end tokens that `min_tokens` suppresses, `bad_words`;
2. `repetition_penalty`, `frequency_penalty`, `presence_penalty`, DRY;
3. `logits_processors`, in the given order; then the grammar again, as they may return logits of their own.

Temperature and the filters come after (`quire.execution.sampling.sampling`). Requests without them skip this.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from quire.errors import describe
from quire.execution.sampling.penalties import penalize_repeats, penalize_tokens
from quire.execution.sampling.token_history import TokenHistory
from quire.execution.sampling.token_masks import add_bias, bad_words_of, forbid, keep_only
from quire.ops.pytorch.torch_rows import apply_token_bitmask
from quire.scheduling.plan import NewSequence
from quire.text.structured.mask_filler import MaskedOutput

# `quire.ops.interface.ops.Ops.apply_token_bitmask`.
KeepTokens = Callable[[torch.Tensor, Sequence[int], Sequence[torch.Tensor]], None]


class LogitsProcessing:
    """The logits processing of one sequence."""

    def __init__(
        self, new_sequence: NewSequence, device: torch.device, grammar_state: MaskedOutput | None = None
    ) -> None:
        params = new_sequence.params
        bias = params.logit_bias or {}
        self.params = params
        self.grammar_state = grammar_state
        self.num_prompt = new_sequence.num_prompt
        self.history = TokenHistory(new_sequence.token_ids, new_sequence.num_prompt) if params.needs_history else None
        self.allowed_ids = None
        if params.allowed_token_ids is not None:
            allowed_ids = array("q", params.allowed_token_ids)  # for a whole vocabulary much faster than a list
            self.allowed_ids = torch.frombuffer(allowed_ids, dtype=torch.int64).to(device)
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        suppressed_ids = new_sequence.suppressed_ids if params.min_tokens else ()
        self.suppressed_ids = torch.tensor(suppressed_ids, dtype=torch.int64, device=device)
        self.bad_words = bad_words_of(new_sequence.bad_words) if new_sequence.bad_words else None
        self.breakers = torch.tensor(new_sequence.dry_breakers, dtype=torch.int32)
        # The first position at which no end token is suppressed. The length of a tensor costs a microsecond.
        self.suppressed_until = new_sequence.num_prompt + params.min_tokens if suppressed_ids else 0

    def is_none(self, position: int) -> bool:
        """True if the logits of the token at `position` are not changed."""
        is_always = self.params.adjusts_logits or self.grammar_state is not None
        return not (is_always or self.is_suppressing(position))

    @property
    def shows_bad_logits(self) -> bool:
        """True if logits that are not finite stay so, because the processing only adds to them."""
        return (
            self.history is None
            and self.grammar_state is None
            and self.allowed_ids is None
            and len(self.suppressed_ids) == 0
        )

    def is_suppressing(self, position: int) -> bool:
        """True while fewer than `min_tokens` output tokens come before `position`."""
        return position < self.suppressed_until


def adjust(
    logits: torch.Tensor, rows: Sequence[tuple[int, LogitsProcessing, int]], keep: KeepTokens = apply_token_bitmask
) -> dict[int, str]:
    """Apply the logits processing of requests to the named rows, in place; return errors by row."""
    errors = constrain(logits, rows, keep)
    keep_only(logits, [(row, own.allowed_ids) for row, own, _ in rows if own.allowed_ids is not None])
    add_bias(logits, [(row, own.bias_ids, own.bias) for row, own, _ in rows if len(own.bias_ids)])
    forbid(logits, [(row, own.suppressed_ids) for row, own, position in rows if own.is_suppressing(position)])
    known = [(row, own, own.history) for row, own, _ in rows if own.history is not None]
    forbid(
        logits,
        [
            (row, own.bad_words.next_ids(history.tokens()[own.num_prompt :]).to(logits.device))
            for row, own, history in known
            if own.bad_words is not None
        ],
    )
    penalized = [(row, own.params, history.counts()) for row, own, history in known if own.params.penalizes_tokens]
    if penalized:
        penalize_tokens(logits, penalized)
    for row, own, history in known:
        if own.params.dry_multiplier:
            penalize_repeats(logits[row], history.tokens(), own.params, own.breakers)
    processed = [(row, own, history) for row, own, history in known if own.params.logits_processors]
    errors |= {row: error for row, own, history in processed if (error := _process(logits[row], own, history))}
    # A processor may return any logits; tokens that a grammar forbids stay forbidden.
    if any(own.grammar_state is not None for _, own, _ in processed):
        own_rows = {row for row, _, _ in processed}
        constrain(logits, [entry for entry in rows if entry[0] in own_rows], keep)
    return {row: error for row, error in errors.items() if error is not None}


def constrain(
    logits: torch.Tensor, rows: Sequence[tuple[int, LogitsProcessing, int]], keep: KeepTokens
) -> dict[int, str | None]:
    """Forbid tokens that the rows' grammars do not allow next; return the grammar's error, or None, by row."""
    constrained = [(row, own.grammar_state, position) for row, own, position in rows if own.grammar_state is not None]
    masks = {row: mask for row, own, position in constrained if (mask := own.mask_at(position)) is not None}
    if masks:
        keep(logits, list(masks), list(masks.values()))
    return {row: grammar_state.error for row, grammar_state, _ in constrained}


def _process(row: torch.Tensor, own: LogitsProcessing, history: TokenHistory) -> str | None:
    """Apply a request's processors to its logits [V]; return the reason of a failure, or None."""
    prompt, output = history.prompt_and_output()
    values = row.clone()
    for processor in own.params.logits_processors:
        name = type(processor).__qualname__
        # An error of the processor, or a bad result, fails only this request.
        try:
            name = getattr(processor, "__qualname__", name)
            values = processor(prompt.copy(), output.copy(), values)
            if not _are_logits(values, row):
                return f"the logits processor {name} must return {len(row)} floating-point logits, none NaN or infinity"
            values = values.to(row)
        except Exception as error:
            return f"the logits processor {name} raised {describe(error)}"
    row.copy_(values)
    return None


def _are_logits(values: object, row: torch.Tensor) -> bool:
    """Return whether values can replace a row of logits [V]; in its dtype they must be neither NaN nor infinity."""
    if not isinstance(values, torch.Tensor) or values.shape != row.shape or not values.is_floating_point():
        return False
    return bool((values.to(row) < torch.inf).all())
