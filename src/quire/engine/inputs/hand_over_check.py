"""Checks the hand-over of blocks that a request asks for."""

from __future__ import annotations

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.kv_transfer import NAME
from quire.sequences.params import SamplingParams


def check_hand_over(config: KVTransferConfig | None, params: SamplingParams) -> None:
    """Check whether an engine can honour the hand-over that a request asks for."""
    asked = params.kv_transfer
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        return
    if config is None:
        raise UnsupportedFeature(NAME, "this engine hands no blocks over; see kv_transfer_config")
    if asked.do_remote_decode and not config.is_producer:
        raise UnsupportedFeature(f"{NAME}.do_remote_decode", f"this engine's kv_role is {config.kv_role}")
    if asked.do_remote_prefill and not config.is_consumer:
        raise UnsupportedFeature(f"{NAME}.do_remote_prefill", f"this engine's kv_role is {config.kv_role}")
    host = asked.remote_host
    if asked.do_remote_prefill and host is not None and not config.may_ask(host):
        allowed = "an address of this host, or one of allowed_hosts in kv_connector_extra_config"
        raise InvalidParameter(f"{NAME}.remote_host", host, allowed)
