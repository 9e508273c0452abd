"""Where a request's blocks may be shared, from what the doors are given."""

from __future__ import annotations

from hashlib import blake2b

from quire.errors import InvalidParameter
from quire.memory.chain import Namespace

# In UTF-8.
MAX_SALT_BYTES = 1024
MAX_TENANT_BYTES = 256


def read_namespace(cache_name: str, cache_salt: object, tenant: object) -> Namespace:
    """Return the namespace of a request.

    Of a salt it has a digest: memory, drafts and the disk keep namespaces for long, and need to tell them apart only.

    Args:
        cache_name: what, of the model, the prefix cache depends on.
        cache_salt: the client's own secret, None for none.
        tenant: who the client is, as the operator has it; None where all are one.

    Raises:
        InvalidParameter: one of the last two is neither None nor a non-empty string, or is too long.
    """
    salt, owner = _bytes("cache_salt", cache_salt, MAX_SALT_BYTES), _bytes("tenant", tenant, MAX_TENANT_BYTES)
    digest = None if salt is None else blake2b(salt, digest_size=32).hexdigest()
    return Namespace(cache_name, None, digest, None if owner is None else owner.decode("utf-8", "surrogatepass"))


def _bytes(field: str, value: object, limit: int) -> bytes | None:
    if value is None:
        return None
    # A character has a byte at least: what is far too long is not encoded first.
    if type(value) is str and 0 < len(value) <= limit:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) <= limit:
            return data
    raise InvalidParameter(field, value, f"a non-empty string of at most {limit} bytes")
