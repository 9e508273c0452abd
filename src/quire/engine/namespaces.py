"""Where a request's blocks may be shared, from what the doors are given."""

from __future__ import annotations

from quire.errors import InvalidParameter
from quire.memory.chain import Namespace


def read_namespace(cache_name: str, cache_salt: object, tenant: object) -> Namespace:
    """Return the namespace of a request.

    Args:
        cache_name: what, of the model, the prefix cache depends on.
        cache_salt: the client's own secret, None for none.
        tenant: who the client is, as the operator has it; None where all are one.

    Raises:
        InvalidParameter: one of the last two is neither None nor a non-empty string.
    """
    return Namespace(cache_name, None, _name("cache_salt", cache_salt), _name("tenant", tenant))


def _name(field: str, value: object) -> str | None:
    if value is None or (type(value) is str and value):
        return value
    raise InvalidParameter(field, value, "a non-empty string")
