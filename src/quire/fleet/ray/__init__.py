"""Replicas on Ray Serve: `serve run quire.fleet.ray:app model=bundled num_replicas=2`.

The application has two deployments: `Ingress`, which gets all requests from Serve's proxies, and `Engine`, whose
replicas have the model. Serve's own configuration may also set their numbers and resources, by these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from quire.errors import ConfigError

__all__ = ["app"]


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run`, `serve deploy` and `serve.run`."""
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise ConfigError("replicas on Ray Serve need ray: pip install 'quire[ray]'", field="ray")
    from quire.fleet.ray.application import build

    return build(args)
