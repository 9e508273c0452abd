"""Pins by name: prompts whose blocks stay in the prefix cache until they are unpinned."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from quire.config import ResolvedConfig
from quire.engine.inputs.prompts import Prompt, PromptReader, TokenPrompt
from quire.engine.inputs.request_options import read_namespace
from quire.errors import InvalidParameter, PinLimitReached, UnsupportedFeature
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams

MAX_NAME_LEN = 256
# A request that computes a prompt and leaves it in the prefix cache.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class PinReport(NamedTuple):
    """The pinned prefixes.

    Args:
        limit: limit of the slabs (with one cache group: blocks) that pins fill.
        filled: number of slabs (with one cache group: blocks) that pins fill.
        tokens: number of tokens of each pin, by name; a tenant's pin is listed as `tenant/name`.
    """

    limit: int
    filled: int
    tokens: dict[str, int]

    def of_tenant(self, tenant: str) -> PinReport:
        """Return the report with the pins of one tenant only."""
        key_prefix = _key("", tenant)
        return self._replace(tokens={name: count for name, count in self.tokens.items() if name.startswith(key_prefix)})


class PrefixPins:
    """Pins prompts of one model."""

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        prompts: PromptReader,
        cache_name: str,
    ) -> None:
        self._config = config
        self._scheduler, self._memory = scheduler, scheduler.memory
        self._prompts = prompts
        self._cache_name = cache_name

    def pin(
        self,
        name: str,
        prompt: Prompt | TokenPrompt,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Pin a prompt's whole blocks, if all of them are in the prefix cache."""
        self._check_name(name, "pin_prefix")
        namespace = read_namespace(self._cache_name, cache_salt, tenant, adapter)
        key = _key(name, tenant)
        if key in self._memory.pins:
            raise InvalidParameter("name", name, "a name that is not in use; unpin that prefix first")
        block_size = self._config.block_size
        tokens, _, media = self._prompts.read(prompt)
        whole, spans = tokens[: len(tokens) // block_size * block_size], [item.span for item in media]
        if not whole:
            raise InvalidParameter("prompt", f"{len(tokens)} tokens", f"at least a block of {block_size} tokens long")
        # A hit leaves the last token to compute, so one is appended.
        hit = self._memory.match_prefix(self._memory.chain([*whole, 0], namespace, spans))
        if hit.num_tokens < len(whole):
            return 0
        if not self._memory.pins.can_add(hit.block_ids):
            raise PinLimitReached(self._memory.pins.num_filled(hit.block_ids), self._memory.pins.limit)
        return self._scheduler.pin(key, self._memory.chain(whole, namespace, spans))

    def unpin(self, name: str, tenant: str | None = None) -> None:
        """Unpin a prefix."""
        self._check_name(name, "unpin_prefix")
        key = _key(name, read_namespace(self._cache_name, None, tenant).tenant)
        if key not in self._memory.pins:
            raise InvalidParameter("name", name, "the name of a pinned prefix")
        self._scheduler.unpin(key)

    def report(self) -> PinReport:
        """Return the pinned prefixes; thread-safe."""
        pins = self._memory.pins
        return PinReport(pins.limit, pins.num_filled(), pins.tokens())

    def _check_name(self, name: str, call: str) -> None:
        if not self._config.enable_prefix_caching:
            raise UnsupportedFeature(call, "prefix caching is off, so there is nothing to pin")
        if not self._memory.pins.limit:
            raise UnsupportedFeature(call, "no memory is set aside for pins; start with a pin_limit above 0")
        if type(name) is not str or not 0 < len(name) <= MAX_NAME_LEN:
            raise InvalidParameter("name", name, f"a string of 1 to {MAX_NAME_LEN} characters")


def _key(name: str, tenant: str | None) -> str:
    """Return the memory manager's unique key of a pin: names are per tenant."""
    if tenant is not None:
        # A quoted tenant contains no slash, so the first slash ends it.
        return f"{quote(tenant, safe='', errors='surrogatepass')}/{name}"
    return f"/{name}" if "/" in name else name
