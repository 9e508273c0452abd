"""Scheduling: the scheduler makes an immutable plan for each step."""

from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from quire.scheduling.preemption import TransferRates
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.stats import SchedulerStats

__all__ = [
    "ItemResult",
    "NewSequence",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerStats",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "TransferRates",
]
