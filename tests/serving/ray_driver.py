"""A driver of Ray Serve in a process of its own: `python -m tests.serving.ray_driver PORT [NODES]`.

It starts a cluster: one node, or those that NODES, a JSON list of Ray's parameters, has; the first one is the head. It
reads commands from its standard input, a JSON object a line, and answers each with a line; it ends with its input.

- `{"deploy": options}` deploys options of the application, "served". A second one is a rolling update.
- `{"deploy": options, "deployments": [...]}` deploys them as `serve deploy` would, with options of Serve for each
  deployment: "served", or the status as JSON where that failed, or, with `"until": words`, where a deployment's
  message has them.
- `{"kill": index}` kills a node's raylet and waits for its end, "killed".
- `{"add": parameters}` starts another node, "added".
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

PARAMETERS: dict[str, Any] = {"object_store_memory": 128 << 20, "include_dashboard": False}


def start_nodes(nodes: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Start raylets of several nodes on this host, connect to the first one, and return the cluster and its nodes."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**PARAMETERS, **nodes[0]})
    others = [cluster.add_node(**PARAMETERS, **each) for each in nodes[1:]]
    ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=nodes[0]["node_ip_address"])
    return cluster, [cluster.head_node, *others]


def deploy(options: dict[str, Any], deployments: list[dict[str, Any]], until: str | None = None) -> str:
    """Deploy an application by Serve's configuration, and return what became of it.

    Args:
        options: options of the application.
        deployments: Serve's options of each deployment.
        until: word of a deployment's message that ends the wait.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": "quire",
        "route_prefix": "/",
        "import_path": "quire.fleet.ray:app",
        "args": options,
        "deployments": deployments,
    }
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    while True:
        (status,) = [each for each in client.list_serve_statuses() if each.name == "quire"]
        said = [each.message for each in status.deployment_statuses if each.message]
        name = status.app_status.status.value
        if name == "RUNNING":
            return "served"
        if name == "DEPLOY_FAILED" or (until is not None and any(until in each for each in said)):
            return json.dumps({"status": name, "message": "\n".join([status.app_status.message, *said])})
        time.sleep(0.1)


def main() -> None:
    """Do what is asked for."""
    import ray
    from ray import serve

    from quire.fleet.ray import app

    cluster: Any = None
    nodes: list[Any] = []
    if len(sys.argv) > 2:
        cluster, nodes = start_nodes(json.loads(sys.argv[2]))
    else:
        ray.init(num_cpus=2, log_to_driver=False, _node_ip_address="127.0.0.1", **PARAMETERS)
    with suppress(TimeoutError):  # on a busy machine, its proxy takes longer than it is waited for
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print("started", flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if "kill" in command:
                (raylet,) = nodes[command["kill"]].all_processes["raylet"]
                raylet.process.kill()
                raylet.process.wait()  # as a zombie it would seem to be alive to its workers
                answer = "killed"
            elif "add" in command:
                nodes.append(cluster.add_node(**PARAMETERS, **command["add"]))
                answer = "added"
            elif "deployments" in command:
                answer = deploy(command["deploy"], command["deployments"], command.get("until"))
            else:
                serve.run(app(command["deploy"]), name="quire", route_prefix="/")
                answer = "served"
            print(answer, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


if __name__ == "__main__":
    main()
