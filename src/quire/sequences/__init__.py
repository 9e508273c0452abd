"""Requests, the sequences they own, and the sampling parameters they carry."""

from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason, SequenceStatus

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence", "SequenceStatus"]
