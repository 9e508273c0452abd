"""Quire on Ray Serve: `serve run quire.serving.ray:app`, with the extra `ray`.

```
 Ingress    HTTP, prompts as tokens --- handle, CacheAwareRouter --> EngineServer   AsyncLLM and its ASGI application
                                             ^--------- KV events ------'
```
"""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError


def app(args: dict[str, Any]) -> Any:
    """Return the application for arguments of `serve run` or of a config file; see `quire.serving.ray.deployments`.

    Raises:
        ConfigError: the extra is not installed, or an argument is not allowed.
    """
    try:
        from quire.serving.ray.deployments import build
    except ImportError as error:
        raise ConfigError("Ray Serve needs the extra ray: pip install 'quire[ray]'", field="ray") from error
    return build(args)
