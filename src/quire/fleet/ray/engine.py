"""The deployment of the engine: a replica has a model, and answers requests like a separate server."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp

from quire import __version__
from quire.config import EngineConfig
from quire.errors import WorkerError
from quire.fleet.ray.app_call import run_app
from quire.fleet.ray.autoscaling import QUEUED_TOKENS, RUNNING
from quire.fleet.ray.call import AnswerHead, RoutedCall, WholeAnswer
from quire.fleet.ray.device import device_of
from quire.platform.bounded.json_text import limit_digits
from quire.server.app import build_app
from quire.server.lifecycle import make_state
from quire.server.settings import ServerConfig
from quire.server.state.tracing import RequestTracer

logger = logging.getLogger(__name__)


class ServedReplica:
    """One replica of the model, in its own actor."""

    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any], kv_events_host: str) -> None:
        from quire.engine.async_llm import AsyncLLM

        limit_digits()
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        gpus = [str(gpu_id) for gpu_id in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]
        device = device_of(str(engine_options.get("device", "auto")), gpus)
        options = {**engine_options, **_events(engine_options, kv_events_host), "device": device}
        config, engine_config = ServerConfig(**server_options), EngineConfig.from_options(**options)
        endpoint = config.otlp_traces_endpoint
        self._tracer = None if endpoint is None else RequestTracer(endpoint, __version__)
        self._llm = AsyncLLM.from_config(engine_config)
        self._state = make_state(self._llm, config, engine_config.model.served_names[1:])
        self._app: ASGIApp = build_app(self._state, self._tracer)

    # ---- requests ----

    async def answer(self, call: RoutedCall) -> AsyncGenerator[AnswerHead | bytes, None]:
        """Yield the head of a request's answer, then the parts of its body as they arrive."""
        async with aclosing(run_app(self._app, call, self._name)) as items:
            async for item in items:
                yield item

    async def answer_whole(self, call: RoutedCall) -> WholeAnswer:
        """Return the answer to a request in one piece."""
        head, *parts = [item async for item in self.answer(call)]
        assert isinstance(head, AnswerHead)
        return WholeAnswer(head, b"".join(part for part in parts if isinstance(part, bytes)))

    async def metrics(self) -> tuple[str, bytes]:
        """Return the replica's name, and its metrics in Prometheus' text format."""
        return self._name, self._llm.metrics.render()

    # ---- Serve's requests ----

    def check_health(self) -> None:
        """Check that the engine makes progress, or has nothing to do."""
        health = self._llm.health()
        if not health.is_alive:
            raise WorkerError(f"the engine of replica {self._name} has died")
        if health.is_stuck:
            raise WorkerError(
                f"the engine of replica {self._name} has completed no step for {health.seconds_since_progress:.0f} s"
            )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the replica's node and process, and the source of its KV events."""
        node_ip = ray.util.get_node_ip_address()
        return {"node_ip": node_ip, "pid": os.getpid(), "kv_events": self._llm.kv_event_source()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the work of the replica, by which Serve scales."""
        return {QUEUED_TOKENS: float(self._llm.queued_tokens()), RUNNING: float(self._llm.health().num_running)}

    def close(self) -> None:
        """End the engine, after Serve has waited for its requests; may be called twice."""
        self._state.close()
        self._llm.shutdown()
        if self._tracer is not None:
            self._tracer.close()

    def __del__(self) -> None:
        # Serve calls it when the replica stops; if the model could not be loaded, there is nothing to close.
        with suppress(AttributeError):
            self.close()


def _events(engine_options: dict[str, Any], host: str) -> dict[str, Any]:
    """Return the options of KV events for the router; none if the user has set them or they are not available."""
    has_ranks = any(engine_options.get(f"{kind}_parallel_size", 1) > 1 for kind in ("tensor", "pipeline"))
    if engine_options.get("kv_events_config") is not None or has_ranks:
        return {}
    if find_spec("msgspec") is None or find_spec("zmq") is None:
        logger.warning("requests are routed without KV events: pip install 'quire[ray]' has what they need")
        return {}
    endpoint = f"tcp://{host}:*"
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": endpoint}
    return {"kv_events_config": events}


def options_of(config: ServerConfig) -> dict[str, Any]:
    """Return a server's options as fields, for a replica."""
    return asdict(config)
