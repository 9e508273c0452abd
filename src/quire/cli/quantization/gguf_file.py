"""Writer of GGUF files, and the choice of each tensor's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from quire.cli.quantization.gguf_blocks import pack_rows
from quire.cli.quantization.gguf_header import FieldValue, TensorPlan, encode_header
from quire.cli.quantization.gguf_model import GGUFLayout
from quire.cli.quantization.gguf_vocabulary import tokenizer_fields
from quire.cli.quantization.output import new_output
from quire.cli.quantization.source import PlainTensors
from quire.distributed.kvstore.record import bytes_of
from quire.engine.startup.model_defaults import sampling_fields
from quire.engine.startup.tokenizers import find_ends
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.gguf import tensor_types as types
from quire.models.gguf.architectures.common import FREQUENCY_FACTORS
from quire.models.gguf.tensor_types import TensorType
from quire.models.specs.spec import ModelSpec, WeightMap
from quire.text.tokenizers.tokenizer import Tokenizer

# Name of a form -> the type of most matrices, and llama.cpp's number for such files.
FORMS: Final[Mapping[str, tuple[TensorType, int]]] = {
    "f32": (types.F32, 0),
    "f16": (types.F16, 1),
    "bf16": (types.BF16, 32),
    "q4_0": (types.Q4_0, 2),
    "q4_1": (types.Q4_1, 3),
    "q5_0": (types.Q5_0, 8),
    "q5_1": (types.Q5_1, 9),
    "q8_0": (types.Q8_0, 7),
    "q4_k": (types.Q4_K, 14),
    "q4_k_m": (types.Q4_K, 15),
    "q5_k": (types.Q5_K, 16),
    "q6_k": (types.Q6_K, 18),
}
# Replacements of the types of 256 values, for rows whose length is no multiple of 256.
SMALLER: Final = {types.Q4_K: types.Q5_0, types.Q5_K: types.Q5_1, types.Q6_K: types.Q8_0}


def type_of(name: str, shape: tuple[int, ...], form: str, spec: ModelSpec) -> TensorType:
    """Return the type of a tensor."""
    if len(shape) == 1:
        return types.F32
    kind, _ = FORMS[form]
    is_head = name == ("token_embd.weight" if spec.tied_head else "output.weight")
    if kind.block_bytes * types.Q6_K.block_values < types.Q6_K.block_bytes * kind.block_values and (
        is_head or (form == "q4_k_m" and _has_more_bits(name, len(spec.layers)))
    ):
        kind = types.Q6_K
    if shape[-1] % kind.block_values:
        kind = SMALLER.get(kind, kind)
    return types.F16 if shape[-1] % kind.block_values else kind


def _has_more_bits(name: str, num_layers: int) -> bool:
    """Return whether the mix Q4_K_M gives a matrix 6 bits: value and down projections of half of the layers."""
    _, number, *parts = name.split(".")
    if parts[0] not in ("attn_v", "ffn_down"):
        return False
    layer, eighth = int(number), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def write_gguf(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    weight_map: WeightMap,
    out: Path,
    form: str,
    progress: Callable[[int, int], None],
) -> None:
    """Write a checkpoint as a GGUF file, with its tokenizer."""
    source = PlainTensors(checkpoint)
    layout = GGUFLayout(str(checkpoint.config["architectures"][0]), spec)
    names = [name for sources in weight_map.values() for name in sources]
    plans = {}
    for name in names:
        stored, shape = layout.name_of(name), source.reader.shape(name, name)
        plans[name] = TensorPlan(stored, type_of(stored, shape, form, spec), shape)
    extra = [] if layout.factors is None else [TensorPlan(FREQUENCY_FACTORS, types.F32, tuple(layout.factors.shape))]
    layout.check(spec, {plan.name: plan.shape for plan in (*extra, *plans.values())})
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    fields: dict[str, FieldValue] = {
        **layout.fields,
        "general.name": checkpoint.folder.name,
        "general.file_type": FORMS[form][1],
        "general.quantization_version": 2,
        **sampling_fields(checkpoint),
        **tokenizer_fields(tokenizer, spec.vocab_size, [end.token_id for end in find_ends(checkpoint, tokenizer)]),
    }
    header = encode_header(fields, [*extra, *plans.values()])
    done, total = 0, sum(plan.num_bytes for plan in plans.values())
    with new_output(out, len(header) + total) as path, path.open("wb") as stream:
        stream.write(header)
        if layout.factors is not None:
            stream.write(bytes_of(layout.factors))
            stream.write(bytes(extra[0].padding))
        for name, plan in plans.items():
            dtype = torch.float16 if plan.type == types.F16 else torch.float32
            values = layout.reordered(name, source.read(name, dtype))
            packed = pack_rows(plan.type, values.view(-1, plan.shape[-1]))
            stream.write(bytes_of(packed))
            stream.write(bytes(plan.padding))
            done += plan.num_bytes
            progress(done, total)
