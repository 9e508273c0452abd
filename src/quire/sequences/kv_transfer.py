"""Parameters of disaggregated prefill: one engine computes the prompt, another continues; with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from quire.errors import InvalidParameter

NAME: Final = "kv_transfer_params"
MOST_BLOCK_IDS = 1 << 20
MOST_TEXT = 1024
# Error code of a request whose required blocks have not arrived whole; another engine may serve it.
LOAD_FAILED: Final = "kv_load_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferParams:
    """Transfer of the blocks of a request's prompt to or from another engine.

    Args:
        do_remote_decode: True if another engine continues the request: the blocks of the prompt are kept for it.
        do_remote_prefill: True if another engine has computed the prompt: its blocks are fetched.
        remote_block_ids: block ids of the other engine, for each cache group; informative, since blocks are found by
            their contents.
        remote_engine_id, remote_request_id: names of the other engine and of its request; informative.
        remote_host, remote_port: address at which the other engine serves blocks.
        tp_size: number of tensor parallel ranks of the other engine.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_block_ids: list[Any] | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON object."""
        return asdict(self)


def read_extra_args(value: object) -> Mapping[str, Any] | None:
    """Return the checked extra arguments of a request; only `kv_transfer_params` is known."""
    if not isinstance(value, Mapping) or value.keys() - {NAME}:
        raise InvalidParameter("extra_args", value, f"a mapping with {NAME}, or None")
    params = value.get(NAME)
    return None if params is None else {NAME: read_kv_transfer_params(params)}


def read_kv_transfer_params(value: object) -> KVTransferParams:
    """Return the checked parameters of a transfer."""
    if isinstance(value, KVTransferParams):
        return value
    names = [item.name for item in fields(KVTransferParams)]
    if not isinstance(value, Mapping):
        raise InvalidParameter(NAME, value, f"an object with {', '.join(names)}")
    for unknown in value.keys() - set(names):
        raise InvalidParameter(f"{NAME}.{unknown}", value[unknown], f"absent; known fields are {', '.join(names)}")
    options = {name: item for name, item in value.items() if item is not None}
    for name in ("do_remote_decode", "do_remote_prefill"):
        _check(options, name, isinstance(options.get(name, False), bool), "true or false")
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        text = options.get(name, "-")
        _check(options, name, isinstance(text, str) and 0 < len(text) <= MOST_TEXT, "a non-empty string or null")
    _check(
        options, "remote_port", _is_whole(options.get("remote_port", 1), 0, 65535), "a port from 0 to 65535, or null"
    )
    _check(options, "tp_size", _is_whole(options.get("tp_size", 1), 1, 1), "1: blocks of parallel ranks are not taken")
    ids = options.get("remote_block_ids", [])
    parts = [part if isinstance(part, list) else [part] for part in ids] if isinstance(ids, list) else [[None]]
    is_good = sum(map(len, parts)) <= MOST_BLOCK_IDS and {type(item) for part in parts for item in part} <= {int}
    _check(options, "remote_block_ids", is_good, "a list of numbers, or of lists of them, or null")
    params = KVTransferParams(**options)
    if params.do_remote_decode and params.do_remote_prefill:
        raise InvalidParameter(f"{NAME}.do_remote_prefill", True, "false where do_remote_decode is true")
    if params.do_remote_prefill and (params.remote_host is None or params.remote_port is None):
        name = "remote_host" if params.remote_host is None else "remote_port"
        raise InvalidParameter(f"{NAME}.{name}", None, "given where do_remote_prefill is true")
    return params


def _check(options: Mapping[str, Any], name: str, is_good: bool, allowed: str) -> None:
    if not is_good:
        raise InvalidParameter(f"{NAME}.{name}", options[name], allowed)


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
