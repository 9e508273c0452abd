"""Serve's router for replicas of the engine, by the contents of their caches and by their queues.

Serve pickles this module by value into every process that has a handle, so all state is in `quire.fleet.ray.fleet`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.fleet.ray.call import RoutedCall, Ticket
from quire.fleet.ray.fleet import open_fleet
from quire.fleet.routing.router import RouterConfig


class CacheAwareRouter(RequestRouter):
    """Ranks the replicas with the core of `quire.fleet.routing`."""

    def initialize_state(self, **options: Any) -> None:
        """Make the router's state."""
        self.fleet = open_fleet(self.app_name, RouterConfig(**options), ray.util.get_node_ip_address())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas."""
        self.fleet.update({replica.replica_id.unique_id: replica.replica_metadata for replica in replicas})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has ended."""
        super().on_replica_actor_died(replica_id)
        self.fleet.drop(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, each in its own rank, the best first."""
        if pending_request is not None:
            # If all replicas are full, Serve waits a while before it asks again.
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = self.fleet.rank(_ticket_of(pending_request) or Ticket())
        return [[by_name[name]] for name in names if name in by_name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica has taken a request."""
        super().on_request_routed(pending_request, replica_id, result)
        ticket = _ticket_of(pending_request)
        if ticket is not None:
            self.fleet.on_routed(ticket, replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Take a replica's number of requests, including requests of other handles."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self.fleet.on_queue_len(replica_id.unique_id, num_ongoing_requests)


def _ticket_of(pending: PendingRequest | None) -> Ticket | None:
    """Return the ticket of a request; None for a call that is not from the ingress."""
    call = pending.args[0] if pending is not None and pending.args else None
    return call.ticket if isinstance(call, RoutedCall) else None
