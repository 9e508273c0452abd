"""The application of Ray Serve: its deployments with Serve's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from quire.errors import ConfigError, shown
from quire.fleet.ray.config import AppConfig, without_origins
from quire.fleet.ray.engine import ServedReplica, options_of
from quire.fleet.ray.ingress import IngressReplica

POLICY: Final = "quire.fleet.ray.autoscaling:QueuedTokensPolicy"
# Period of Serve's health checks, and the time without an answer after which a replica is unhealthy.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0
# Time after the running requests in which a replica saves its state and ends.
CLOSE_S = 40.0
MAX_INGRESS_REQUESTS = 8192


def build(args: Mapping[str, Any]) -> Any:
    """Return the application; see `quire.fleet.ray.app`."""
    config = AppConfig.read(args)
    engine = serve.deployment(ServedReplica, name="Engine").options(**engine_deployment(config))
    ingress = serve.deployment(serve.ingress()(IngressReplica), name="Ingress").options(
        num_replicas=config.replicas.num_ingress,
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=config.server.drain_timeout_s + 5.0,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )
    server_options = options_of(without_origins(config.server))
    bound = engine.bind(config.engine.to_options(), server_options, config.replicas.kv_events_host)
    return ingress.bind(bound, options_of(config.server))


def engine_deployment(config: AppConfig) -> dict[str, Any]:
    """Return Serve's options for the engine's deployment."""
    replicas = config.replicas
    try:
        router = RequestRouterConfig(request_router_class=replicas.request_router)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"request_router must be the path of a class, got {shown(replicas.request_router)}: {error}",
            field="request_router",
        ) from error
    options: dict[str, Any] = {
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "graceful_shutdown_timeout_s": config.server.drain_timeout_s + CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "request_router_config": router,
        "ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
    }
    num_ranks = config.engine.parallel.num_ranks
    if num_ranks > 1 and replicas.num_cpus:
        # The ranks are processes of the replica, so all their cores must be on its node.
        of_ranks = [{"CPU": replicas.num_cpus} for _ in range(num_ranks)]
        if replicas.num_gpus:
            # The actor is in the first bundle, and its ranks see the actor's GPUs.
            of_ranks[0]["GPU"] = replicas.num_gpus
        options["placement_group_bundles"] = of_ranks
        options["placement_group_strategy"] = "STRICT_PACK"
    if replicas.max_replicas is None:
        return {**options, "num_replicas": replicas.num_replicas}
    targets = {"target_queued_tokens": replicas.target_queued_tokens, "target_running": config.target_running}
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs=targets)
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=replicas.num_replicas,
        max_replicas=replicas.max_replicas,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        policy=policy,
    )
    return options
