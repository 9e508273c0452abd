"""Decoding: strategies turn sampled tokens into edits of sequences, and drafters propose tokens to verify."""

from quire.sequences.decoding.beams import Beams
from quire.sequences.decoding.drafting import Drafter
from quire.sequences.decoding.stop import StopStrings, end_of_tokens
from quire.sequences.decoding.strategies import Sampling, strategy_of
from quire.sequences.strategy import Append, BeamEdit, Drop, Edit, Fail, Finish, Fork, Strategy, Truncate

__all__ = [
    "Append",
    "BeamEdit",
    "Beams",
    "Drafter",
    "Drop",
    "Edit",
    "Fail",
    "Finish",
    "Fork",
    "Sampling",
    "StopStrings",
    "Strategy",
    "Truncate",
    "end_of_tokens",
    "strategy_of",
]
