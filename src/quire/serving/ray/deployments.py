"""The deployments: an autoscaled one of engines, behind one of ingresses.

Arguments of `serve run quire.serving.ray:app`, and of `args` in a config file:

- `model` and all other options of `LLM(...)`;
- `server`: options of `quire serve` that are not of the address, such as `api_key`;
- `num_replicas`; or `min_replicas`, `max_replicas` and `queued_tokens`, tokens of waiting prompts for each replica;
- `num_cpus`, `num_gpus`, `resources`: what a replica takes of the cluster;
- `router`: constants of the score; see `quire.routing.router.RouterConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from quire.config import option_sections
from quire.errors import ConfigError, shown
from quire.serving.ray.engine_server import EngineServer
from quire.serving.ray.ingress import Ingress
from quire.serving.ray.request_router import CacheAwareRouter

OWN: Final = frozenset(
    {
        *("server", "router", "num_replicas", "min_replicas", "max_replicas", "queued_tokens"),
        *("num_cpus", "num_gpus", "resources", "max_ongoing_requests"),
    }
)
DEFAULT_QUEUED_TOKENS: Final = 4096
MAX_ONGOING: Final = 256


def build(args: Mapping[str, Any]) -> Any:
    """Return the application.

    Raises:
        ConfigError: an argument is not known, or its value is not allowed.
    """
    sections = option_sections()
    unknown = [name for name in args if name not in OWN and name not in sections]
    if unknown:
        raise ConfigError(
            f"unknown argument {shown(unknown[0])}; known are {', '.join(sorted(OWN))} and the options of LLM(...)",
            field=unknown[0],
        )
    engine_options = {name: value for name, value in args.items() if name in sections}
    server = args.get("server", {})
    if not isinstance(server, Mapping):
        raise ConfigError(f"server must be a mapping of options, got {shown(server)}", field="server")
    actor = {"num_cpus": args.get("num_cpus", 1), "num_gpus": args.get("num_gpus", 0)}
    if args.get("resources"):
        actor["resources"] = dict(args["resources"])
    engine = serve.deployment(
        EngineServerOnNode,
        name="engine",
        ray_actor_options=actor,
        max_ongoing_requests=int(args.get("max_ongoing_requests", MAX_ONGOING)),
        request_router_config=RequestRouterConfig(
            request_router_class=CacheAwareRouter, request_router_kwargs=dict(args.get("router", {}))
        ),
        health_check_period_s=5,
        **_scaling(args),
    )
    ingress = serve.deployment(
        Ingress, name="ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4 * MAX_ONGOING
    )
    return ingress.bind(engine.bind(engine_options, dict(server)), server.get("tenant_header"))


class EngineServerOnNode(EngineServer):
    """An engine that knows the address of its node.

    Args:
        engine_options, server_options: see `EngineServer`.
    """

    def __init__(self, engine_options: Mapping[str, Any], server_options: Mapping[str, Any]) -> None:
        super().__init__(engine_options, server_options, ray.util.get_node_ip_address())


def _scaling(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a deployment for its number of replicas."""
    if "max_replicas" not in args:
        return {"num_replicas": int(args.get("num_replicas", 1))}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=int(args.get("min_replicas", 1)),
            max_replicas=int(args["max_replicas"]),
            policy=AutoscalingPolicy(
                policy_function="quire.serving.ray.autoscaling:QueuedTokensPolicy",
                policy_kwargs={"queued_tokens": int(args.get("queued_tokens", DEFAULT_QUEUED_TOKENS))},
            ),
        )
    }
