"""Scheduling: one frozen plan for each step."""

from quire.scheduling.plan import ItemResult, Opening, PlanItem, StepPlan, StepResult, TokenLogprobs
from quire.scheduling.preemption import TransferRates
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.stats import SchedulerStats

__all__ = [
    "ItemResult",
    "Opening",
    "PlanItem",
    "Scheduler",
    "SchedulerStats",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "TransferRates",
]
