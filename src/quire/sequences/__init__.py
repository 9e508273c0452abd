"""Requests, their sequences, and their sampling parameters."""

from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason, SequenceStatus

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence", "SequenceStatus"]
