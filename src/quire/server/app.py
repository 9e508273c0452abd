"""The application: routes, middleware, and errors in one form.

Starlette and the engine's own validator replace a heavier framework: a request passes one set of checks, its errors
have one form, and the server starts sooner.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from quire.errors import UnsupportedPart
from quire.server.generation.served_model import model_name
from quire.server.operations import adapters, block_routes, monitoring, pins
from quire.server.operations.page_files import page
from quire.server.protocols import (
    anthropic_messages,
    chat_completions,
    completions,
    models,
    ollama,
    ollama_embed,
    pooling,
    prompt_tokens,
    responses,
    tokens,
)
from quire.server.requests.errors import handle_http_exception
from quire.server.state.auth import check_operator, guarded
from quire.server.state.intake import GENERATING, Intake
from quire.server.state.request_log import RequestRecorder
from quire.server.state.state import ServerState
from quire.server.state.tracing import RequestTracer

Handler = Callable[[ServerState, Request], Awaitable[ASGIApp]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", page),
    ("GET", "/page/{name:path}", page),
    ("GET", "/health", monitoring.health),
    ("GET", "/ping", monitoring.health),
    ("POST", "/ping", monitoring.health),
    ("GET", "/load", monitoring.load),
    ("GET", "/version", monitoring.version),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model_id:path}", models.show_model),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat_completions.chat_completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/responses/input_tokens", responses.input_tokens),
    ("POST", "/v1/messages", anthropic_messages.messages),
    ("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama_embed.embed),
    ("POST", "/api/embeddings", ollama_embed.embed_one),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.running),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/score", pooling.score),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/classify", pooling.classify),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/prompt_tokens", prompt_tokens.prompt_tokens),
)
# Routes that show all clients' requests, or act on shared state.
OPERATION: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/metrics", monitoring.metrics),
    ("GET", "/status", monitoring.status),
    ("GET", "/kv", monitoring.kv),
    ("GET", "/kv/map", block_routes.watch_map),
    ("GET", "/kv/block", block_routes.show_block),
    ("GET", "/kv/request", block_routes.show_request),
    ("GET", "/kv/tree", block_routes.show_tree),
    ("GET", "/kv_event_sources", monitoring.kv_event_sources),
    ("POST", "/reset_prefix_cache", monitoring.reset_prefix_cache),
    ("POST", "/pin_prefix", pins.pin_prefix),
    ("POST", "/unpin_prefix", pins.unpin_prefix),
    ("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter),
)


def build_app(state: ServerState, tracer: RequestTracer | None = None) -> Starlette:
    """Build the ASGI application of a server.

    Args:
        state: state of the server.
        tracer: maker of the requests' spans, None without tracing.
    """
    paths = [path for _, path, _ in (*ROUTES, *OPERATION)]
    middleware = [
        Middleware(RequestRecorder, state=state, tracer=tracer, paths=paths),
        Middleware(guarded, config=state.config),
        Middleware(Intake, bodies=state.bodies, admit=partial(_admit, state)),
    ]
    rows: list[tuple[str, str, Handler]] = [*ROUTES]
    rows += [(method, path, partial(_operate, handler)) for method, path, handler in OPERATION]
    # The guard turns an exception of a handler into an answer.
    routes = [Route(path, partial(_handle, handler, state), methods=[method]) for method, path, handler in rows]
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: handle_http_exception},
    )
    # A redirect would lead to the host that the client names, and every path has one form.
    app.router.redirect_slashes = False
    return app


async def _handle(handler: Handler, state: ServerState, request: Request) -> ASGIApp:
    """Run a handler; an error about a part that is no text names the model that the request selects."""
    try:
        return await handler(state, request)
    except UnsupportedPart as error:
        raise error.of_model(model_name(state, request)) from None


def _admit(state: ServerState, scope: Scope) -> None:
    """Refuse a request that would wait in a full queue."""
    if scope["path"] in GENERATING and scope["method"] == "POST" and not state.is_draining:
        state.llm.check_room()


async def _operate(handler: Handler, state: ServerState, request: Request) -> ASGIApp:
    """Run the handler of a route of operation, after the check of its key."""
    check_operator(request, has_operators=state.config.operator_key is not None)
    return await handler(state, request)
