"""The GGUF representation of a model: metadata fields, and the names and row orders of tensors.

The fields are derived from the model's specification, and parsed again before a file is written. A model is refused if
the parsed specification differs from the original one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from quire.cli.quantization.gguf_header import FieldValue
from quire.errors import ConfigError, UnsupportedModel, shown
from quire.models.families import build
from quire.models.gguf.architectures import ARCHITECTURES, AxisSwap, read_architecture
from quire.models.gguf.architectures.common import ENDS, LLAMA
from quire.models.specs.frequencies import inverse_frequencies
from quire.models.specs.rotations import LinearScaling, Llama3Scaling, Rope, YarnScaling
from quire.models.specs.spec import Attention, GatedMLP, ModelSpec

# The supported families, and their GGUF architectures.
WRITTEN: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GGUFLayout:
    """The fields and tensors of a model in a GGUF file."""

    def __init__(self, family: str, spec: ModelSpec) -> None:
        if family not in WRITTEN:
            raise UnsupportedModel(
                f"GGUF files of {shown(family)} are not written; written are {', '.join(WRITTEN)} "
                "(compressed-tensors, --to int4 or int8, has more families)",
                field="to",
            )
        architecture = WRITTEN[family]
        attention, mlp = spec.layers[0].mixer, spec.layers[0].ffn
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GatedMLP)
        assert attention.rope is not None
        numbers: dict[str, FieldValue] = {
            "block_count": len(spec.layers),
            "context_length": spec.max_position,
            "embedding_length": spec.width,
            "feed_forward_length": mlp.width,
            "vocab_size": spec.vocab_size,
            "attention.head_count": attention.num_heads,
            "attention.head_count_kv": attention.num_kv_heads,
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
            "attention.layer_norm_rms_epsilon": spec.norm.eps,
            "rope.dimension_count": attention.head_dim,
        }
        if attention.window is not None:
            numbers["attention.sliding_window"] = attention.window
        numbers |= _rope_fields(attention.rope)
        self.fields: dict[str, FieldValue] = {"general.architecture": architecture, "general.type": "model"}
        self.fields |= {f"{architecture}.{name}": value for name, value in numbers.items()}
        self.factors: Tensor | None = None
        if isinstance(attention.rope.scaling, Llama3Scaling):
            plain, scaled = (
                inverse_frequencies(rope, attention.head_dim)[0]
                for rope in (Rope(attention.rope.theta), attention.rope)
            )
            self.factors = plain / scaled
        config = {
            "head_dim": attention.head_dim,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
        }
        changes = ARCHITECTURES[architecture].changes(config)
        self._orders = {name: change.row_order for name, change in changes.items()}

    def name_of(self, name: str) -> str:
        """Return the name of a tensor of the checkpoint in the GGUF file."""
        match = _LAYER.fullmatch(name)
        return ENDS[name] if match is None else f"blk.{match[1]}.{LLAMA[match[2]]}.{match[3]}"

    def reordered(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the checkpoint with its rows in the order of the GGUF file."""
        match = _LAYER.fullmatch(name)
        order = None if match is None else self._orders.get(f"{match[2]}.{match[3]}")
        return tensor if order is None else _inverse(order, tensor)

    def check(self, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Parse fields and shapes as from the file, and refuse a model that would be read differently."""
        fields = {
            name: struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value
            for name, value in self.fields.items()
        }
        factors = [] if self.factors is None else self.factors.tolist()
        try:
            config, _ = read_architecture(fields, shapes, lambda _: factors)
            differences = [*_differences(build(config)[0], spec)]
        except ConfigError as error:
            differences = [str(error)]
        if differences:
            raise UnsupportedModel(f"a GGUF file cannot say this of the model: {'; '.join(differences)}", field="to")


def _differences(read: ModelSpec, spec: ModelSpec) -> Iterator[str]:
    """Yield the differences between the parsed specification and the model's specification."""
    for name in ("vocab_size", "width", "norm", "tied_head", "max_position", "embedding_scale", "logit_scale"):
        if getattr(read, name) != getattr(spec, name):
            yield f"{name} {getattr(spec, name)}"
    for idx, (ours, theirs) in enumerate(zip(spec.layers, read.layers, strict=True)):
        if ours != theirs:
            yield f"layer {idx}, {ours}"
            return
    if read != spec:
        yield "an option of the model"


def _inverse(order: AxisSwap, tensor: Tensor) -> Tensor:
    """Return rows in the inverse order of `order`."""
    return torch.empty_like(tensor).index_copy_(0, torch.tensor(order.indices()), tensor)


def _rope_fields(rope: Rope) -> dict[str, FieldValue]:
    """Return the fields of a rotary embedding; Llama 3's scaling is written as a tensor instead."""
    fields: dict[str, FieldValue] = {"rope.freq_base": float(rope.theta)}
    match rope.scaling:
        case LinearScaling(factor):
            return fields | {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnScaling():
            return fields | {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope.scaling.factor),
                "rope.scaling.original_context_length": rope.scaling.original_max_position,
                "rope.scaling.yarn_beta_fast": float(rope.scaling.beta_fast),
                "rope.scaling.yarn_beta_slow": float(rope.scaling.beta_slow),
            }
    return fields
