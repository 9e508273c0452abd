"""The metrics of all replicas in one text, with a label for the replica."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

logger = logging.getLogger(__name__)

# Labels for a replica of the engine, and for a replica of the ingress.
REPLICA: Final = "replica"
INGRESS: Final = "ingress"


class _Merged(Collector):
    """Metric families of several texts, each sample with the name of its replica."""

    def __init__(self, texts: Iterable[tuple[str, bytes]], label: str) -> None:
        self._families: dict[str, Metric] = {}
        for replica, text in texts:
            for family in text_string_to_metric_families(text.decode()):
                merged = self._families.get(family.name)
                if merged is None:
                    merged = self._families[family.name] = Metric(family.name, family.documentation, family.type)
                merged.samples += [
                    Sample(sample.name, {**sample.labels, label: replica}, sample.value) for sample in family.samples
                ]

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, because the names come from the texts."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._families.values()


def merge_metrics(answers: Iterable[Any], label: str = REPLICA) -> bytes:
    """Return the metrics of all replicas in Prometheus' text format."""
    texts = [answer for answer in answers if not isinstance(answer, BaseException)]
    registry = CollectorRegistry()
    registry.register(_Merged(texts, label))
    return generate_latest(registry)
