"""Options of a request besides its prompt and sampling parameters, and the namespace of its cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from quire.errors import InvalidParameter
from quire.memory.prefix.token_chain import Namespace
from quire.sequences.lora import LoRARequest

# In UTF-8.
MAX_SALT_BYTES = 1024
MAX_TENANT_BYTES = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request, checked at construction; all interfaces use them, in Python and over HTTP.

    Args:
        priority: lower runs first, under the scheduling policy "priority"; under "fcfs" it must be 0, which the engine
            checks.
        flow: name of a flow; flows take turns, independent of their numbers of requests. None: a flow of its own.
        cache_salt, tenant: only requests with equal values of both share cached prefixes.
        retain_cache: True to evict the request's cached blocks last, within `retention_limit`.
        add_special_tokens: True to add the tokenizer's special tokens to a text prompt.
        lora_request: adapter of the request; None for the base model.
        final_only: True for few outputs, which cost less than a delta in each step; see `Engine.add_request` and
            `AsyncLLM.generate`.

    Raises:
        InvalidParameter: an option of another type, or a salt or a tenant that is empty or too long.
    """

    priority: int = 0
    flow: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    retain_cache: bool = False
    add_special_tokens: bool = True
    lora_request: LoRARequest | None = None
    final_only: bool = False

    def __post_init__(self) -> None:
        for name in ("retain_cache", "add_special_tokens", "final_only"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise InvalidParameter(name, value, "true or false")
        _bytes("cache_salt", self.cache_salt, MAX_SALT_BYTES)
        _bytes("tenant", self.tenant, MAX_TENANT_BYTES)

    def namespace(self, cache_name: str, adapter: str | None) -> Namespace:
        """Return the namespace of the request; see `read_namespace`."""
        return read_namespace(cache_name, self.cache_salt, self.tenant, adapter)


def read_namespace(cache_name: str, cache_salt: object, tenant: object, adapter: str | None = None) -> Namespace:
    """Return the namespace of a request.

    It has a digest of the salt, not the salt itself: memory, drafters and the disk keep namespaces for long, and only
    compare them.

    Args:
        cache_name: identity of the model for the prefix cache.
        cache_salt: the client's own secret, or None.
        tenant: operator's name of the client; None if clients are not distinguished.
        adapter: digest of the adapter's content; None for the base model.

    Raises:
        InvalidParameter: the salt or the tenant is neither None nor a non-empty string, or is too long.
    """
    salt, owner = _bytes("cache_salt", cache_salt, MAX_SALT_BYTES), _bytes("tenant", tenant, MAX_TENANT_BYTES)
    digest = None if salt is None else blake2b(salt, digest_size=32).hexdigest()
    return Namespace(cache_name, adapter, digest, None if owner is None else owner.decode("utf-8", "surrogatepass"))


def _bytes(field: str, value: object, limit: int) -> bytes | None:
    if value is None:
        return None
    # A character has at least one byte, so strings that are far too long are not encoded.
    if type(value) is str and 0 < len(value) <= limit:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) <= limit:
            return data
    raise InvalidParameter(field, value, f"a non-empty string of at most {limit} bytes")
