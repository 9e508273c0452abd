"""The prompt of a request as tokens, from a server, since only servers have template and tokenizer."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from quire.fleet.proxy.exchange import Exchange
from quire.fleet.routing.router import RouteRequest
from quire.fleet.routing.shadow_tree import Scope
from quire.memory.kv_events import encode

SESSION_HEADER: Final = "x-session-id"
# Number of stored tokens, in all prompts together; 4 bytes each.
MAX_KEPT_TOKENS = 4 << 20

# Asks for the tokens of a request, and the model that it names.
Ask = Callable[[bytes, str | None], Awaitable[bytes | None]]


class Prompt(NamedTuple):
    """The prompt of a request that is routed.

    Args:
        token_ids: tokens of the prompt; empty if they are unknown.
        scope: scope within which it shares blocks.
    """

    token_ids: list[int]
    scope: Scope


class RoutedPrompts:
    """Finds the tokens of prompts, and stores the last ones."""

    def __init__(self, ask: Ask, tenant_header: str | None = None) -> None:
        self._ask = ask
        self.tenant_header = tenant_header
        self._kept: OrderedDict[bytes, Prompt] = OrderedDict()
        self._num_kept = 0

    async def request_of(self, exchange: Exchange) -> RouteRequest:
        """Return the router's part of a client's request: its prompt, and the name of its conversation."""
        fields = exchange.fields
        tenant = None if self.tenant_header is None else exchange.headers.get(self.tenant_header)
        prompt = await self.read(exchange.path, exchange.body, fields, tenant)
        session = exchange.headers.get(SESSION_HEADER) or fields.get("prompt_cache_key")
        return RouteRequest(prompt.token_ids, prompt.scope, session if isinstance(session, str) else None)

    async def read(self, path: str, raw: bytes, body: Mapping[str, Any], tenant: str | None) -> Prompt:
        """Return the prompt of a request."""
        value = body.get("prompt") if path == "/v1/completions" else None
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[0]
        is_tokens = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in value)
        key = blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            prompt = self._kept[key]
        elif is_tokens and value and body.get("cache_salt") is None and body.get("model") is None:
            prompt = Prompt(value, Scope())
        else:
            model = body.get("model") if isinstance(body.get("model"), str) else None
            prompt = _read(await self._ask(b'{"path":%b,"body":%b}' % (json.dumps(path).encode(), raw), model))
            self._keep(key, prompt)
        return prompt._replace(scope=prompt.scope._replace(tenant=tenant))

    def _keep(self, key: bytes, prompt: Prompt) -> None:
        if not prompt.token_ids:
            return
        self._kept[key] = prompt
        self._num_kept += len(prompt.token_ids)
        while self._num_kept > MAX_KEPT_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest.token_ids)


def _read(answer: bytes | None) -> Prompt:
    """Return the prompt of an answer; without an answer, a prompt without tokens, so that queues decide."""
    try:
        fields = json.loads(answer or b"{}")
        token_ids, adapter, salt = (fields.get(name) for name in ("tokens", "adapter", "cache_salt"))
        encode(token_ids)
    except (ValueError, AttributeError, TypeError, OverflowError):
        return Prompt([], Scope())
    texts = [value if isinstance(value, str) else None for value in (adapter, salt)]
    return Prompt(token_ids, Scope(texts[0], texts[1]))
