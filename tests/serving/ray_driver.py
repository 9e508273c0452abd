"""A driver of Ray Serve in a process of its own: `python -m tests.serving.ray_driver PORT`.

It reads options of the application from its standard input, a JSON object a line, deploys them, and prints a line when
they are served. A second line is a rolling update. It ends with its input.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress


def main() -> None:
    """Deploy what is asked for."""
    import ray
    from ray import serve

    from quire.serving.ray import app

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        _node_ip_address="127.0.0.1",
    )
    with suppress(TimeoutError):  # on a busy machine, its proxy takes longer than it is waited for
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print("started", flush=True)
    try:
        for line in sys.stdin:
            serve.run(app(json.loads(line)), name="quire", route_prefix="/")
            print("served", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
