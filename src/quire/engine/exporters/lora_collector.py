"""The Prometheus metric of the LoRA adapters in use, for request routers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.engine import Engine
from quire.sequences.status import SequenceStatus

# Greatest number of adapter names in a label value; the last ones in alphabetical order are left out.
MAX_NAMES = 64
LABELS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")


class LoraMetrics(Collector):
    """Exports the adapters of running and waiting requests: one sample, whose value is the time of the scrape.

    The labels of earlier scrapes are not kept, and names are those of the operator's adapters.
    """

    def __init__(self, engine: Engine, prefix: str, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._name, self._clock = engine, f"{prefix}:lora_requests_info", clock

    def collect(self) -> Iterator[Metric]:
        """Yield the metric; nothing if the engine has no adapters."""
        adapters = self._engine.adapters
        if adapters is None:
            return
        # Where one adapter has several names, the first name that was loaded is shown.
        names = {each.slot: each.name for each in reversed(adapters.loaded)}
        running, waiting = set[str](), set[str]()
        for request in tuple(self._engine.scheduler.requests.values()):
            name = None if request.adapter is None else names.get(request.adapter)
            if name is not None:
                is_running = any(each.status is SequenceStatus.RUNNING for each in tuple(request.sequences))
                (running if is_running else waiting).add(name)
        family = GaugeMetricFamily(
            self._name, "Adapters of running and waiting requests; the value is the time.", labels=LABELS
        )
        family.add_metric([*map(_joined, (running, waiting)), str(adapters.limit)], self._clock())
        yield family


def _joined(names: set[str]) -> str:
    return ",".join(sorted(names)[:MAX_NAMES])
