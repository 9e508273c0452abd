"""The first notice to a front: the server and its model."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from quire import __version__
from quire.config import ResolvedConfig
from quire.errors import ConfigError
from quire.models.checkpoints.pooling_config import PoolingConfig
from quire.models.specs.encoder_spec import ClassifierHead
from quire.server.fronts.messages import VERSION
from quire.server.settings import ServerConfig
from quire.server.state.request_log import JsonLines
from quire.text.tokenizers.tokenizer import TokenizerParts

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.async_llm import AsyncLLM

# Fields of a head that classifies which only the engine needs.
_HEAD_DEFAULTS: dict[str, Any] = {"activation": "gelu", "bias": False, "norm": None}


class Welcome(msgspec.Struct, kw_only=True):
    """The server and its model."""

    protocol: int
    version: str
    config: ServerConfig
    created: int
    model_name: str
    aliases: tuple[str, ...]
    resolved: ResolvedConfig
    pooling: dict[str, Any]
    default_params: dict[str, Any]
    end_token_ids: tuple[int, ...]
    tokenizer: TokenizerParts | None
    log_level: int
    is_log_json: bool


def make_welcome(llm: AsyncLLM, config: ServerConfig, aliases: tuple[str, ...], created: int) -> Any:
    """Return the value of the notice, as JSON has it."""
    pooling = llm.pooling._asdict()
    head = llm.pooling.head
    if head is not None:
        pooling["head"] = {"labels": head.labels, "pooling": head.pooling, "scores": head.scores}
    handlers = logging.getLogger().handlers
    welcome = Welcome(
        protocol=VERSION,
        version=__version__,
        config=config,
        created=created,
        model_name=llm.model_name,
        aliases=aliases,
        resolved=llm.resolved,
        pooling=pooling,
        default_params=llm.default_sampling_params(),
        end_token_ids=tuple(sorted(llm.texts.end_token_ids)),
        tokenizer=None if llm.tokenizer is None else llm.tokenizer.parts,
        log_level=logging.getLogger().level,
        is_log_json=any(isinstance(handler.formatter, JsonLines) for handler in handlers),
    )
    return msgspec.to_builtins(welcome, enc_hook=_plain)


def read_welcome(value: Any) -> Welcome:
    """Return the notice."""
    if (value["protocol"], value["version"]) != (VERSION, __version__):
        raise ConfigError(
            f"the engine's process runs Quire {value['version']}, and this front {__version__}: restart the server"
        )
    return msgspec.convert(value, Welcome)


def read_pooling_fields(fields: dict[str, Any]) -> PoolingConfig:
    """Return the pooling of a welcome."""
    head = fields["head"]
    if head is not None:
        head = ClassifierHead(**{**_HEAD_DEFAULTS, **head, "labels": tuple(head["labels"])})
    tokens = fields["classifier"]
    return PoolingConfig(**{**fields, "head": head, "classifier": None if tokens is None else tuple(tokens)})


def _plain(value: Any) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
