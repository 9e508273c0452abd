"""All routers of simulated fleets, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.measurement.simulation.event_routing import KVEventRouter
from quire.measurement.simulation.routing import LeastLoaded, PrefixAware, RoundRobin, SimulatedRouter

# Name -> constructor of an empty router.
ROUTERS: Mapping[str, Callable[[], SimulatedRouter]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "kv_events": KVEventRouter,
}
