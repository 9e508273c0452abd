"""Decoding: what becomes of the tokens that the data plane draws."""

from quire.decoding.edits import Append, Edit, Finish, Fork
from quire.decoding.stop import StopStrings, end_of_tokens
from quire.decoding.strategies import Sampling, Strategy

__all__ = ["Append", "Edit", "Finish", "Fork", "Sampling", "StopStrings", "Strategy", "end_of_tokens"]
