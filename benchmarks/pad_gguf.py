"""A GGUF file of Gemma 3 whose rows have a multiple of 256 inputs: `python -m benchmarks.pad_gguf FILE TARGET`.

K-quants have blocks of 256 inputs, so files of narrower models store most layers in other types. Here the hidden state
gets zeros up to the next multiple, and the function stays the same: norms divide by the root of a mean over more
values, and embeddings are multiplied by the root of the greater width, so both are stored smaller by the inverse
factor; the last norm is not, since the head has the embeddings. Values are dequantised, and stored in float32, for
`llama-quantize`.
"""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from typing import Any

MULTIPLE = 256
WIDTH, EPS = "gemma3.embedding_length", "gemma3.attention.layer_norm_rms_epsilon"
# Tensors that stay as they are: norms of heads.
OF_HEADS = ("attn_q_norm.weight", "attn_k_norm.weight")


def pad(source: Path, target: Path) -> None:
    """Write the file.

    Raises:
        ValueError: the file is not one of Gemma 3.
    """
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader(source)
    fields = {field.name: field for field in reader.fields.values()}
    if WIDTH not in fields:
        raise ValueError(f"{source} has no field {WIDTH}: it is no file of Gemma 3")
    width = int(fields[WIDTH].contents())
    wide = math.ceil(width / MULTIPLE) * MULTIPLE
    changed = {WIDTH: wide, EPS: float(fields[EPS].contents()) * width / wide}
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], sub_type)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype("float32")
        writer.add_tensor(tensor.name, padded(tensor.name, values, width, wide))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def padded(name: str, values: Any, width: int, wide: int) -> Any:
    """Return a tensor of the wider model."""
    numpy: Any = importlib.import_module("numpy")
    if name.endswith(OF_HEADS):
        return values
    if name == "token_embd.weight" or (values.ndim == 1 and name != "output_norm.weight"):
        values = values * numpy.float32(math.sqrt(width / wide))
    return numpy.pad(values, [(0, wide - width if size == width else 0) for size in values.shape])


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    pad(args.file, args.target)


if __name__ == "__main__":
    main()
