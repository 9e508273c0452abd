"""Salts and tenants become digests of bounded size."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.inputs.request_options import MAX_SALT_BYTES, MAX_TENANT_BYTES, read_namespace
from quire.errors import InvalidParameter


def test_a_salt_is_kept_as_a_digest_of_fixed_length() -> None:
    salts = ["s", "s" * MAX_SALT_BYTES, "s" * (MAX_SALT_BYTES - 1), "\u00e9" * (MAX_SALT_BYTES // 2), "\ud800", "t"]
    kept = [read_namespace("model", salt, None).cache_salt for salt in salts]
    assert {len(text or "") for text in kept} == {64}
    assert len(set(kept)) == len(salts)
    assert read_namespace("model", "s", None).cache_salt == kept[0]
    assert read_namespace("model", None, "acme") == ("model", None, None, "acme")


@pytest.mark.parametrize("value", ["", 1, b"s", ["s"], True])
@pytest.mark.parametrize("field", ["cache_salt", "tenant"])
def test_anything_but_a_short_string_is_refused(field: str, value: Any) -> None:
    limit = {"cache_salt": MAX_SALT_BYTES, "tenant": MAX_TENANT_BYTES}[field]
    names = {"cache_salt": None, "tenant": None}
    for bad in (value, "s" * (limit + 1), "\u00e9" * (limit // 2 + 1)):
        with pytest.raises(InvalidParameter, match=f"{field} must be a non-empty string of at most {limit} bytes"):
            read_namespace("model", **(names | {field: bad}))
    read_namespace("model", **(names | {field: "s" * limit}))
