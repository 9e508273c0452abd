"""What parameters may say of a beam search, and which others mean nothing beside one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import InvalidParameter
from quire.sequences.param_checks import integer, number

if TYPE_CHECKING:
    from quire.sequences.params import SamplingParams

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0
# What shapes a random choice, and the values that leave it alone. A model may recommend others, for samples.
CHOICE_FIELDS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0}
NO_CHOICE = {"temperature": 1.0, **CHOICE_FIELDS}


def check_beams(params: SamplingParams) -> float:
    """Check what belongs to beam search.

    Args:
        params: all else of it is checked.

    Returns:
        The length penalty, as a float.

    Raises:
        InvalidParameter: a value out of bounds, a parameter of beam search without one, or one that a search, which
            draws nothing, would ignore.
    """
    length_penalty = number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if params.early_stopping != "never" and not isinstance(params.early_stopping, bool):
        raise InvalidParameter("early_stopping", params.early_stopping, 'true, false or "never"')
    if params.beam_width is None:
        for name, value, default in (
            ("length_penalty", length_penalty, 1.0),
            ("early_stopping", params.early_stopping, False),
        ):
            if value != default:
                raise InvalidParameter(name, value, f"{default} without beam_width: it belongs to beam search")
        return length_penalty
    integer("beam_width", params.beam_width, 2, MAX_BEAM_WIDTH)
    if params.best_of is not None:
        raise InvalidParameter("best_of", params.best_of, "absent beside beam_width, which says how many to compare")
    if params.strategy is not None:
        raise InvalidParameter("strategy", params.strategy, "absent beside beam_width: beam search is a strategy")
    if params.speculative:
        raise InvalidParameter("speculative", True, "false or absent beside beam_width: beams have no drafts")
    if params.n > params.beam_width:
        raise InvalidParameter("n", params.n, f"at most beam_width ({params.beam_width})")
    if params.temperature not in (0.0, 1.0):
        raise InvalidParameter("temperature", params.temperature, "0 or 1 beside beam_width: nothing is drawn")
    for name, default in CHOICE_FIELDS.items():
        if getattr(params, name) != default:
            raise InvalidParameter(name, getattr(params, name), f"{default:g} beside beam_width: nothing is drawn")
    return length_penalty
