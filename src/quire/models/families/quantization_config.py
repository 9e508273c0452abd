"""The quantisation method in a checkpoint's configuration; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, ConfigError, UnsupportedModel, shown
from quire.models.families.hf_config import HFConfig

# Current and former name of the object.
FIELDS: Final = ("quantization_config", "compression_config")
METHODS: Final = ("compressed-tensors", "awq", "gptq", "mxfp4", "fp8")
SERVED: Final = (
    "compressed-tensors (pack-quantized of 4 and 8 bits, int-quantized, float-quantized, mxfp4-pack-quantized), awq "
    "(gemm, 4 bits), gptq (4 and 8 bits), fp8 (e4m3, scales of blocks, channels or tensors) and mxfp4"
)
REASONS: Final[Mapping[str, str]] = {
    "modelopt": "its formats of 8-bit and 4-bit floating point are not implemented",
    "bitsandbytes": "its codes refer to tables in the checkpoint",
}


class QuantizationConfig(NamedTuple):
    """The quantisation method of a checkpoint, and its fields.

    Args:
        method: one of `METHODS`.
        fields: fields of the method.
    """

    method: str
    fields: HFConfig


def read_quantization_config(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Read the quantisation method of a checkpoint; None if its configuration has none.

    Args:
        config: content of `config.json`.

    Raises:
        UnsupportedModel: the method is not served.
        CheckpointError: a field is of the wrong type.
    """
    parts = (config, config.get("text_config"))
    candidates = [(part, name) for part in parts if isinstance(part, Mapping) for name in FIELDS if part.get(name)]
    if not candidates:
        return None
    part, name = candidates[0]
    if not isinstance(part[name], Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, got {shown(part[name])}", field=name)
    fields = HFConfig(part[name], f"{name}.")
    method = fields.text("quant_method", "compressed-tensors" if fields.has("config_groups") else "")
    if method in METHODS:
        return QuantizationConfig(method, fields)
    raise UnsupportedModel(
        f"the checkpoint is quantised by the method {shown(method)}, which is not served: "
        f"{REASONS.get(method, 'the method is not implemented')}; served are {SERVED}",
        field=name,
    )


def check_stored_method(wanted: str | None, config: Mapping[str, Any], *, is_gguf: bool) -> None:
    """Check that a checkpoint has the quantisation method that the user expects.

    Args:
        wanted: the option `stored_quantization`; None expects nothing.
        config: content of `config.json`.
        is_gguf: True for a GGUF file.

    Raises:
        ConfigError: it does not.
    """
    if wanted is None:
        return
    read = None if is_gguf else read_quantization_config(config)
    method = "gguf" if is_gguf else None if read is None else read.method
    if method != wanted:
        stored = "plain weights, which int8 and int4 round" if method is None else f"weights by the method {method}"
        raise ConfigError(
            f"quantization must be what the checkpoint has, or int8 or int4, or absent, got {shown(wanted)}: the "
            f"checkpoint has {stored}",
            field="quantization",
        )


def without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration without the fields of quantisation, as of the same model with plain weights."""
    plain = {name: value for name, value in config.items() if name not in FIELDS}
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        plain["text_config"] = {name: value for name, value in text.items() if name not in FIELDS}
    return plain
