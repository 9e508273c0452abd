"""Requests, the sequences they own, and the sampling parameters they carry."""

from quire.sequences.params import SamplingParams
from quire.sequences.request import Request
from quire.sequences.sequence import FinishReason, Sequence, SequenceStatus

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence", "SequenceStatus"]
