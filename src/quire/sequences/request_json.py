"""Requests as JSON values, for other processes that plan the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from typing import Any, Final

from quire.errors import UnsupportedFeature
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.memory.prefix.token_chain import Namespace
from quire.sequences.media import Media
from quire.sequences.params import RequestOutputKind, SamplingParams
from quire.sequences.pooling import Pooling
from quire.sequences.sequence import Request
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens

# Functions stay in the process that got them, which samples the tokens.
_CALLABLE: Final = frozenset({"logits_processors", "strategy"})
_DEFAULTS: Final = SamplingParams()
_FIELDS: Final = tuple(item.name for item in fields(SamplingParams) if item.init and item.name not in _CALLABLE)
_PLAIN: Final = (
    *("request_id", "max_total_tokens", "arrival", "seed", "priority", "flow", "retain_cache", "adapter"),
    "prompt_token_ids",
)


def check_travels(request: Request) -> None:
    """Check that other processes can plan a request as this one does.

    Raises:
        UnsupportedFeature: the request has a custom strategy.
    """
    if request.params.strategy is not None:
        raise UnsupportedFeature("strategy", "it is Python code, and every rank plans for itself; use one process")


def request_to_json(request: Request, pack: Callable[[object], Any]) -> dict[str, Any]:
    """Return a request that was not scheduled yet as a JSON value; see `check_travels`.

    Args:
        request: the request.
        pack: function that returns the embeddings of a medium as a JSON value.
    """
    value = {name: getattr(request, name) for name in _PLAIN}
    value["params"] = params_to_json(request.params)
    value["has_processors"] = bool(request.params.logits_processors)
    value["namespace"] = list(request.namespace)
    value["end_token_ids"] = sorted(request.end_token_ids)
    value["bad_words"] = list(map(list, request.bad_words))
    value["dry_breakers"] = list(request.dry_breakers)
    value["pooling"] = None if request.pooling is None else list(request.pooling)
    value["media"] = [
        [spans_to_json([one.span])[0], pack(one.embeddings), one.grid, one.sees_itself] for one in request.media
    ]
    return value


def request_from_json(value: dict[str, Any], unpack: Callable[[Any], object]) -> Request:
    """Return the request that `request_to_json` encoded; `unpack` is the inverse of `pack`."""
    params, pooling = params_from_json(value["params"]), value["pooling"]
    if value["has_processors"]:
        params = replace(params, logits_processors=(_stay_elsewhere,))
    if pooling is not None:
        token_ids, *others = pooling
        pooling = Pooling(tuple(token_ids), *others)
    return Request(
        **{name: value[name] for name in _PLAIN},
        params=params,
        namespace=Namespace(*value["namespace"]),
        end_token_ids=frozenset(value["end_token_ids"]),
        bad_words=tuple(map(tuple, value["bad_words"])),
        dry_breakers=tuple(value["dry_breakers"]),
        pooling=pooling,
        media=tuple(
            Media(spans_from_json([span])[0], unpack(packed), None if grid is None else (grid[0], grid[1]), sees_itself)
            for span, packed, grid, sees_itself in value["media"]
        ),
    )


def spans_to_json(spans: Iterable[MediaSpan]) -> list[list[Any]]:
    """Return spans as a JSON value."""
    return [[span.start, span.num_tokens, span.digest.hex()] for span in spans]


def spans_from_json(values: list[list[Any]]) -> list[MediaSpan]:
    """Return the spans that `spans_to_json` encoded."""
    return [MediaSpan(start, num_tokens, bytes.fromhex(digest)) for start, num_tokens, digest in values]


def _stay_elsewhere(*_: object) -> Any:
    """Placeholder of logits processors in a process that samples no tokens; plans depend on whether there are any."""
    raise AssertionError("logits are processed where tokens are drawn")


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults as a JSON value, without functions."""
    attributes = {name: getattr(params, name) for name in _FIELDS}
    value = {name: attribute for name, attribute in attributes.items() if attribute != getattr(_DEFAULTS, name)}
    if "output_kind" in value:
        value["output_kind"] = params.output_kind.name
    if params.extra_args is not None:
        value["extra_args"] = {name: arg.as_json() for name, arg in params.extra_args.items()}
    if params.logit_bias is not None:
        value["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias.items()]
    if params.structured_outputs is not None:
        value["structured_outputs"] = asdict(params.structured_outputs)
    if params.thinking is not None:
        thinking = asdict(params.thinking)
        value["thinking"] = {**thinking, "boundary_ids": sorted(thinking["boundary_ids"])}
    return value


def params_from_json(value: dict[str, Any]) -> SamplingParams:
    """Return the parameters that `params_to_json` encoded."""
    options: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    if "output_kind" in options:
        options["output_kind"] = RequestOutputKind[options["output_kind"]]
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    if "structured_outputs" in options:
        outputs = options["structured_outputs"]
        choice = outputs["choice"]
        options["structured_outputs"] = StructuredOutputs(
            **{**outputs, "choice": None if choice is None else tuple(choice)}
        )
    if "thinking" in options:
        thinking = options["thinking"]
        options["thinking"] = ThinkingTokens(
            thinking["start_id"],
            tuple(thinking["end_ids"]),
            tuple(thinking["close_ids"]),
            frozenset(thinking["boundary_ids"]),
            thinking["has_headers"],
            tuple(thinking["turn_ids"]),
        )
    return SamplingParams(**options)
