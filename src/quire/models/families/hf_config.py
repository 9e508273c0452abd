"""Typed reading of a checkpoint's `config.json`: fields are checked, and values that are not implemented refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.specs.rotations import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    Sections,
    YarnScaling,
)

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Activation

# Fields that change a model's results, and their only implemented values; checked in every nested object too.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
# Name of an activation -> Quire's name.
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Names in `layer_types` of layers with full attention and with a window.
FULL, WINDOWED = "full_attention", "sliding_attention"
# The largest size, count or id; fewer layers and hidden states, because objects are made for each before any tensor is
# read.
MAX_INTEGER = 2**31 - 1
MOST: Mapping[str, int] = {"num_hidden_layers": 1024, "depth": 1024, "altup_num_inputs": 64}
ROPE_TYPES = "default, linear, dynamic, llama3, yarn, proportional, mrope"
# Supported rotations of a part of a head.
PARTIAL_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_MISSING = object()


class HFConfig:
    """A `config.json` in the format of Hugging Face, or a nested object of it."""

    def __init__(self, fields: Mapping[str, Any], prefix: str = "") -> None:
        self._fields = fields
        self._prefix = prefix
        for name, allowed in NEUTRAL.items():
            self.require(name, *allowed)

    def require(self, name: str, *allowed: object) -> None:
        """Refuse a field whose value is none of `allowed`; a missing field passes."""
        value = self._fields.get(name, _MISSING)
        if value is not _MISSING and value not in allowed:
            raise UnsupportedModel(
                f"config.json: {self._prefix}{name} is {shown(value)}, but only "
                f"{' or '.join(repr(choice) for choice in allowed)} is implemented",
                field=name,
            )

    def filled(self, defaults: Mapping[str, Any]) -> HFConfig:
        """Return the configuration with a family's defaults for fields that are missing or null."""
        stated = {name: value for name, value in self._fields.items() if value is not None}
        return HFConfig({**defaults, **stated}, self._prefix)

    def renamed(self, names: Mapping[str, str]) -> HFConfig:
        """Return the configuration with fields under the keys of `names` that it has under their values only."""
        found = {ours: self._fields[theirs] for ours, theirs in names.items() if theirs in self._fields}
        return HFConfig({**found, **self._fields}, self._prefix)

    def changed(self, changes: Mapping[str, Any]) -> HFConfig:
        """Return the configuration with some fields replaced."""
        return HFConfig({**self._fields, **changes}, self._prefix)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Read an integer, at least `least`; null counts as missing."""
        value, most = self._get(name, default), MOST.get(name, MAX_INTEGER)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def integer_or_none(self, name: str, missing: int) -> int | None:
        """Read a positive integer or null; `missing` for a missing field."""
        return None if self._fields.get(name, missing) is None else self.integer(name, missing)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number; null counts as missing."""
        value = self._get(name, default)
        if not _is_positive(value):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def fraction(self, name: str, default: float) -> float:
        """Read a positive number of at most 1; null counts as missing."""
        value = self.number(name, default)
        if value > 1:
            raise self._wrong(name, value, "at most 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false; null counts as missing."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self._fields.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the field exists and is null."""
        return name in self._fields and self._fields[name] is None

    def part(self, name: str) -> HFConfig | None:
        """Read a nested object; None if it is missing or null."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return None if value is None else HFConfig(value, f"{self._prefix}{name}.")

    def parts(self, name: str) -> dict[str, HFConfig] | None:
        """Read an object of objects; None if it is missing or null."""
        whole = self.part(name)
        return None if whole is None else {key: whole.part(key) or HFConfig({}) for key in whole._fields}

    def names(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(self._fields)

    def text(self, name: str, default: str) -> str:
        """Read a string; null counts as missing."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings; missing or null is empty."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._wrong(name, value, "a list of strings")
        return tuple(value)

    def count(self, name: str, default: int) -> int:
        """Read an integer of at least 0; null counts as missing."""
        return self.integer(name, default, least=0)

    def indices(self, name: str) -> frozenset[int]:
        """Read a list of indices; missing or null is empty."""
        value = self._fields.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(index) is int and index >= 0 for index in value):
            raise self._wrong(name, value, "a list of indices")
        return frozenset(value)

    def ascending(self, name: str, limit: int) -> tuple[int, ...]:
        """Read a list of indices below `limit`, each more than the one before it; missing or null is empty."""
        value = self._fields.get(name)
        if value is None:
            return ()
        found = self.indices(name)
        if value != sorted(found) or max(found, default=0) >= limit:
            raise self._wrong(name, value, f"a list of ascending indices below {limit}")
        return tuple(value)

    def flags(self, name: str) -> tuple[bool, ...]:
        """Read a list of zeros and ones; missing or null is empty."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(flag, int) and flag in (0, 1) for flag in value):
            raise self._wrong(name, value, "a list of zeros and ones")
        return tuple(map(bool, value))

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """Read a positive integer for each of `count` layers; a single one is that of all layers."""
        value = self._get(name, None)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(type(each) is int and 0 < each <= MAX_INTEGER for each in values):
            raise self._wrong(name, value, f"an integer from 1 to {MAX_INTEGER}, or a list of {count}")
        return tuple(values)

    def shares(self, name: str, count: int) -> tuple[float, ...]:
        """Read a list of `count` numbers from 0 up to 1, without 1."""
        value = self._get(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(each == 0 or (_is_positive(each) and each < 1) for each in value)
        ):
            raise self._wrong(name, value, f"a list of {count} numbers from 0 to below 1")
        return tuple(map(float, value))

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Read a list of positive numbers, of the length of `default`; null counts as missing."""
        return self.vector(name, len(default)) if self.has(name) else default

    def vector(self, name: str, length: int) -> tuple[float, ...]:
        """Read a list of positive numbers."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self._wrong(name, value, f"a list of {length} positive numbers")
        return tuple(map(float, value))

    def _get(self, name: str, default: object) -> object:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json lacks the field {self._prefix}{name}", field=name)
        return value

    def _wrong(self, name: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self._prefix}{name} must be {allowed}, got {shown(value)}", field=name)


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def read_rope(config: HFConfig, default_theta: float = 10_000.0) -> Rope:
    """Read the rotation from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    part = config.part("rope_parameters") or config.part("rope_scaling")
    return read_rope_part(config, part, config.number("rope_theta", default_theta))


def read_rope_part(config: HFConfig, part: HFConfig | None, default_theta: float) -> Rope:
    """Read a rotation from a nested object; one without scaling for None."""
    config.require("partial_rotary_factor", None, 1.0)
    if part is None:
        return Rope(default_theta)
    return Rope(part.number("rope_theta", default_theta), _read_scaling(config, part))


def text_config(config: HFConfig) -> HFConfig:
    """Return the configuration of the language model inside another one; one without fields if there is none."""
    return config.part("text_config") or HFConfig({}, "text_config.")


def read_num_turned(config: HFConfig, part: HFConfig, head_dim: int, default: float) -> int:
    """Read the number of leading values of a head that are rotated, from `partial_rotary_factor`."""
    name = "partial_rotary_factor"
    fraction = part.fraction(name, config.fraction(name, default))
    num_turned = int(head_dim * fraction)
    if num_turned == 0 or num_turned % 2:
        raise CheckpointError(
            f"config.json: {name} must leave an even part of head_dim ({head_dim}) to turn, got {fraction}", field=name
        )
    return num_turned


def read_partial_rope(config: HFConfig, head_dim: int, default: float, *, interleaved: bool = False) -> Rope:
    """Read the rotation of a head's leading values, a `partial_rotary_factor` of them.

    `mrope_section` and `mrope_interleaved` divide the frequencies among the three positions of an image token. The
    three positions of a text token are equal, so these fields have no effect.
    """
    name = "partial_rotary_factor"
    part = config.part("rope_parameters") or config.part("rope_scaling") or HFConfig({})
    for kind in ("rope_type", "type"):
        part.require(kind, None, *PARTIAL_ROPE_TYPES)
    num_turned = read_num_turned(config, part, head_dim, default)
    whole = {name: None}
    rope = read_rope_part(config.changed(whole), part.changed(whole), config.number("rope_theta", 1e4))
    return replace(rope, num_turned=num_turned, interleaved=interleaved)


def read_sections(config: HFConfig, default: tuple[int, int, int], *, interleaved: bool) -> Sections:
    """Read the axes of the frequencies of a model that reads images, from `mrope_section`."""
    part = config.part("rope_parameters") or config.part("rope_scaling") or HFConfig({})
    counts = part.vector("mrope_section", 3) if part.has("mrope_section") else default
    part.require("mrope_interleaved", None, interleaved)
    return Sections((int(counts[0]), int(counts[1]), int(counts[2])), interleaved)


def read_activation(config: HFConfig, name: str = "hidden_act") -> Activation:
    """Read the activation of the FFNs' gates."""
    value = config.text(name, "silu")
    if value not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: {name} is {shown(value)}, but only {', '.join(map(repr, ACTIVATIONS))} are implemented",
            field=name,
        )
    return ACTIVATIONS[value]


def refuse_layer_types(config: HFConfig, *allowed: str) -> None:
    """Refuse kinds of layers other than `allowed`."""
    for kind in config.texts("layer_types"):
        if kind not in allowed:
            raise UnsupportedModel(
                f"config.json: layer_types names {shown(kind)}, but only "
                f"{' and '.join(map(repr, allowed))} can be here",
                field="layer_types",
            )


def read_layer_kinds(
    config: HFConfig, allowed: Sequence[str], kind_of: Callable[[int], str], older: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Read the kind of every layer."""
    older = older or {}
    num_layers = config.integer("num_hidden_layers")
    refuse_layer_types(config, *allowed, *older)
    stated = tuple(older.get(kind, kind) for kind in config.texts("layer_types"))
    kinds = stated or tuple(kind_of(idx) for idx in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types must have one entry for each of {num_layers} layers, got {len(kinds)}",
            field="layer_types",
        )
    return kinds


def read_windows(config: HFConfig, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Read the window of every layer; None for full attention."""
    kinds = read_layer_kinds(config, (FULL, WINDOWED), lambda idx: WINDOWED if has_window(idx) else FULL)
    return tuple(config.integer("sliding_window") if kind == WINDOWED else None for kind in kinds)


def read_max_position(config: HFConfig, rope: Rope | None) -> int:
    """Read the longest context, which a YaRN checkpoint may state without its scaling."""
    limit = config.integer("max_position_embeddings")
    if rope is not None and isinstance(rope.scaling, YarnScaling):
        stretched = rope.scaling.original_max_position * rope.scaling.factor
        if stretched > MAX_INTEGER:
            raise CheckpointError(
                f"config.json: factor and original_max_position_embeddings make contexts of {stretched:g} tokens, and "
                f"{MAX_INTEGER} is the most",
                field="factor",
            )
        limit = max(limit, int(stretched))
    return limit


def _read_scaling(config: HFConfig, part: HFConfig) -> RopeScaling | None:
    kind = part.text("rope_type", part.text("type", "default"))
    if kind == "proportional":
        return ProportionalScaling(part.fraction("partial_rotary_factor", 1.0), part.number("factor", 1.0))
    part.require("partial_rotary_factor", None, 1.0)
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic NTK changes the base only beyond max_position_embeddings, the longest context that is served; M-RoPE
        # divides the frequencies among the three positions of an image token, which are equal for a text token.
        return None
    if kind == "linear":
        return LinearScaling(part.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModel(
            f"config.json: rope_type {shown(kind)} is not implemented; implemented are {ROPE_TYPES}", field="rope_type"
        )
    name = "original_max_position_embeddings"
    original = (config if config.has(name) else part).integer(name, config.integer("max_position_embeddings"))
    factor = part.number("factor")
    if kind == "llama3":
        return Llama3Scaling(factor, part.number("low_freq_factor"), part.number("high_freq_factor"), original)
    return YarnScaling(
        factor,
        original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(part, factor),
        truncate=part.flag("truncate", True),
    )


def _yarn_attention_factor(part: HFConfig, factor: float) -> float:
    if part.has("attention_factor"):
        return part.number("attention_factor")

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if part.has("mscale") and part.has("mscale_all_dim"):
        return sharpening(part.number("mscale")) / sharpening(part.number("mscale_all_dim"))
    return sharpening(1.0)
