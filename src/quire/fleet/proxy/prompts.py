"""The prompt of a request as tokens, from a server, since only servers have template and tokenizer."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from quire.errors import WorkerError
from quire.fleet.proxy.exchange import Exchange
from quire.fleet.routing.router import RouteRequest
from quire.fleet.routing.shadow_tree import Scope
from quire.server.requests.body import BodyReader, check_json
from quire.server.requests.errors import ApiError

SESSION_HEADER: Final = "x-session-id"
# Length of a session's name, above which its digest stands for it: the router stores names.
MAX_SESSION_CHARS: Final = 256
# Size of all stored prompts together, in tokens of 4 bytes, and what each prompt adds to its tokens and texts.
MAX_KEPT_TOKENS: Final = 4 << 20
KEPT_OVERHEAD: Final = 256

# Asks for the tokens of a request, and the model that it names.
Ask = Callable[[bytes, str | None], Awaitable[bytes | None]]


class Prompt(NamedTuple):
    """The prompt of a request that is routed.

    Args:
        token_ids: tokens of the prompt; empty if they are unknown.
        scope: scope within which it shares blocks.
    """

    token_ids: Sequence[int]
    scope: Scope

    @property
    def size(self) -> int:
        """Size of the prompt in memory, in tokens."""
        return KEPT_OVERHEAD + len(self.token_ids) + sum(len(text) for text in self.scope if text is not None)


UNKNOWN: Final = Prompt((), Scope())


class RoutedPrompts:
    """Finds the tokens of prompts, and stores the last ones.

    Args:
        ask: function that returns a server's answer to `POST /prompt_tokens`; None without an answer.
        bodies: parser of requests and of these answers.
        tenant_header: header with the tenant of a request; None without tenants.
    """

    def __init__(self, ask: Ask, bodies: BodyReader, tenant_header: str | None = None) -> None:
        self._ask = ask
        self._bodies = bodies
        self.tenant_header = tenant_header
        self._kept: OrderedDict[bytes, Prompt] = OrderedDict()
        self._num_kept = 0

    async def request_of(self, exchange: Exchange) -> RouteRequest:
        """Return the router's part of a client's request: its prompt, and the name of its conversation.

        Raises:
            ApiError: the body is no JSON object within the server's limits, or is sent as something else.
        """
        check_json(exchange.request)
        fields = exchange.fields = await self._bodies.parse_object(exchange.body)
        tenant = None if self.tenant_header is None else exchange.headers.get(self.tenant_header)
        prompt = await self.read(exchange.path, exchange.body, fields, tenant)
        session = exchange.headers.get(SESSION_HEADER) or fields.get("prompt_cache_key")
        return RouteRequest(prompt.token_ids, prompt.scope, _short(session) if isinstance(session, str) else None)

    async def read_fields(self, exchange: Exchange) -> None:
        """Read the fields of a request without a prompt; a body that is no valid JSON object has none."""
        with suppress(ApiError):
            exchange.fields = await self._bodies.parse_object(exchange.body)

    async def read(self, path: str, raw: bytes, body: Mapping[str, Any], tenant: str | None) -> Prompt:
        """Return the prompt of a request."""
        key = blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
        tokens = _own_tokens(body) if path == "/v1/completions" else None
        if key in self._kept:
            self._kept.move_to_end(key)
            prompt = self._kept[key]
        elif tokens and body.get("cache_salt") is None and body.get("model") is None:
            prompt = Prompt(tokens, Scope())
        else:
            model = body.get("model") if isinstance(body.get("model"), str) else None
            question = b'{"path":%b,"body":%b}' % (json.dumps(path).encode(), raw)
            prompt = await self._parse(await self._ask(question, model))
            self._keep(key, prompt)
        return prompt._replace(scope=prompt.scope._replace(tenant=tenant))

    async def _parse(self, answer: bytes | None) -> Prompt:
        """Return the prompt of an answer; if it has none, one without tokens, so that queues decide."""
        if answer is None:
            return UNKNOWN
        try:
            fields = await self._bodies.parse_object(answer)
        except (ApiError, WorkerError):
            return UNKNOWN
        tokens = _as_tokens(fields.get("tokens"))
        texts = [value if isinstance(value, str) else None for value in map(fields.get, ("adapter", "cache_salt"))]
        return UNKNOWN if tokens is None else Prompt(tokens, Scope(*texts))

    def _keep(self, key: bytes, prompt: Prompt) -> None:
        if not prompt.token_ids:
            return
        if key in self._kept:  # equal requests may ask at the same time
            self._num_kept -= self._kept.pop(key).size
        self._kept[key] = prompt
        self._num_kept += prompt.size
        while self._num_kept > MAX_KEPT_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= oldest.size


def _own_tokens(body: Mapping[str, Any]) -> array[int] | None:
    """Return the first prompt of a request that has tokens as its prompt; None for other prompts."""
    value = body.get("prompt")
    return _as_tokens(value[0] if isinstance(value, list) and value and isinstance(value[0], list) else value)


def _as_tokens(value: Any) -> array[int] | None:
    """Return token ids, 4 bytes each; None for anything else."""
    try:
        return array("I", value) if isinstance(value, list) else None
    except (TypeError, OverflowError):
        return None


def _short(name: str) -> str:
    """Return a session's name, or what stands for a long one."""
    if len(name) <= MAX_SESSION_CHARS:
        return name
    return blake2b(name.encode(), digest_size=16).hexdigest()
