"""What a model of transformers does with attention and state, observed by running it without any of Quire's code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OBSERVED = "observed_by_tests"
FIRST, SECOND = 37, 19


class Facts(NamedTuple):
    """What came of running two sequences packed into one row, without a cache, and the second one alone.

    Args:
        layers: of each call of the attention interface, in order, the layer that it names; None where it names none.
        has_own_mask: whether a call's mask is another value than the mask function returned, or a call has a bias or an
            index of tokens besides, or a mask is of the rows of a step: it cannot be evaluated at later positions.
        mixes_sequences: whether the second sequence's logits differ from those of it alone.
        depends_on_steps: whether logits of one sequence differ when its first tokens are in transformers' cache.
        error: transformers' own error, if running it packed failed.
    """

    layers: list[int | None]
    has_own_mask: bool
    mixes_sequences: bool
    depends_on_steps: bool
    error: str | None


def observe(model: Any) -> Facts:
    """Run a small model with real weights, and return what it did."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(10, 190, (1, length), generator=generator) for length in (FIRST, SECOND))
    with _observation(model.config) as (layers, own):
        try:
            alone = _logits(model, second, torch.arange(SECOND)[None])
            layers.clear()
            positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
            packed = _logits(model, torch.cat([first, second], 1), positions)[:, FIRST:]
        except Exception as error:
            return Facts(layers, any(own), False, False, f"{type(error).__name__}: {error}")
        calls = list(layers)
        depends_on_steps = _depends_on_steps(model, first)
    return Facts(calls, any(own), _differ(packed, alone), depends_on_steps, None)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not bool((one - other).abs().max() / other.std() < 1e-3)


@torch.inference_mode()
def _depends_on_steps(model: Any, ids: torch.Tensor) -> bool:
    """Run a sequence whole, and in two steps with transformers' cache; a model that cannot do that does not differ."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    try:
        before = model(input_ids=ids[:, :SECOND], use_cache=True)
        after = model(input_ids=ids[:, SECOND:], use_cache=True, **{name: before[name]}).logits
    except Exception:
        return False
    return _differ(after, model(input_ids=ids, use_cache=False).logits[:, SECOND:])


@torch.inference_mode()
def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


@contextmanager
def _observation(config: PreTrainedConfig) -> Iterator[tuple[list[int | None], list[bool]]]:
    """Have attention and masks of a configuration's models go through functions that note each call."""
    layers: list[int | None] = []
    own: list[bool] = []
    masks: list[Any] = []

    def mask(*args: Any, **kwargs: Any) -> Any:
        masks.append(eager_mask(*args, **kwargs))
        if not is_of_positions(kwargs["mask_function"]):
            own.append(True)
        return masks[-1]

    def is_of_positions(function: Any) -> bool:
        first, later = torch.tensor(0), torch.tensor([[10 * (FIRST + SECOND)]])
        try:
            function(first, first, later, later)
        except IndexError:
            return False
        return True

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        layers.append(getattr(module, "layer_idx", None))
        bias = options.get("position_bias")
        is_plain = all(options.get(name) is None for name in ("position_bias", "indices", "block_indices"))
        own.append(not is_plain or not any(attention_mask is each for each in (None, *masks)))
        return _attention(module, query, key, value, [bias, attention_mask, apart(query)], options), None

    def apart(query: torch.Tensor) -> torch.Tensor | None:
        """Keep packed sequences apart, since many modules do not tell the mask function about positions."""
        if query.shape[2] != FIRST + SECOND:
            return None
        second = torch.arange(FIRST + SECOND) >= FIRST
        return torch.where(second[:, None] == second, 0.0, -torch.inf)

    everywhere = [config, *(getattr(config, name) for name in config.sub_configs)]
    before = [each._attn_implementation for each in everywhere]
    ALL_ATTENTION_FUNCTIONS.register(OBSERVED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, mask)
    try:
        for each in everywhere:
            each._attn_implementation = OBSERVED
        yield layers, own
    finally:
        for each, name in zip(everywhere, before, strict=True):
            each._attn_implementation = name


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: list[Any], options: Any
) -> torch.Tensor:
    """Attend with all that modules ask of the interface; [1, H, T, D] to [1, T, H, D]."""
    groups = query.shape[1] // key.shape[1]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    weights = query @ key.repeat_interleave(groups, 1).mT * scale
    if options.get("softcap") is not None:
        weights = (weights / options["softcap"]).tanh() * options["softcap"]
    for each in masks:
        if each is not None:
            weights = weights + each
    sinks = next((each for name in ("s_aux", "sinks") if (each := options.get(name)) is not None), None)
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    if sinks is not None:
        columns = sinks.reshape(1, -1, 1, 1).expand(*weights.shape[:-1], 1) if sinks.dim() == 1 else sinks
        weights = torch.cat([weights, columns], -1).softmax(-1)[..., :-1]
    else:
        weights = weights.softmax(-1)
    attended: torch.Tensor = (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)
    return attended.contiguous()
