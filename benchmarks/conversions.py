"""The checkpoint in the forms that peers read: `python -m benchmarks.conversions FORM MODEL TARGET`.

Runs under the interpreter of the peer that reads the form: `optimum-intel` writes OpenVINO's, `gguf` and llama.cpp's
library write llama.cpp's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import MIXES
from benchmarks.gguf_shapes import add_metadata

# Names in checkpoints -> in GGUF files.
OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
INT4 = ("--group-size", "128", "--ratio", "1.0", "--sym")


def openvino(weights: str, more: tuple[str, ...], model: Path, target: Path) -> None:
    """Write a folder in OpenVINO's intermediate representation."""
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, *more, str(target)]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def gguf(kind: str, model: Path, target: Path) -> None:
    """Write a GGUF file without a vocabulary, in 16 bits."""
    gguf = importlib.import_module("gguf")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, config["model_type"])
    add_metadata(writer, config)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.upper()}"))
    for name, values in tensors(model):
        gguf_name, bits = gguf_name_of(name), values
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            bits = pairs_side_by_side(values, config["head_dim"])
        if values.ndim == 1 or kind == "f16":
            floats = (bits.astype("uint32") << 16).view("float32")
            writer.add_tensor(gguf_name, floats if values.ndim == 1 else floats.astype("float16"))
        else:
            writer.add_tensor(gguf_name, bits.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_gguf(mix: str, model: Path, target: Path) -> None:
    """Write a GGUF file with the model's shape and random blocks."""
    from benchmarks import make_gguf

    make_gguf.write(target, mix, json.loads((model / "config.json").read_text(encoding="utf-8")))


def quantized_gguf(kind: str, model: Path, target: Path) -> None:
    """Write a GGUF file with the blocks of 8 or 4 bits that llama.cpp's own tool writes."""
    lib: Any = importlib.import_module("llama_cpp")
    whole = target.with_name(f"{target.name}.whole")
    gguf("bf16", model, whole)
    params = lib.llama_model_quantize_default_params()
    params.nthread = 1
    params.ftype = {"q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
    status = lib.llama_model_quantize(str(whole).encode(), str(target).encode(), params)
    whole.unlink()
    if status:
        raise RuntimeError(f"llama_model_quantize answers {status}")


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Return the name and the bfloat16 bits, as a numpy array, of each tensor of a checkpoint's one file."""
    numpy = importlib.import_module("numpy")
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, past_last = entry["data_offsets"]
            file.seek(begin + first)
            yield name, numpy.frombuffer(file.read(past_last - first), "uint16").reshape(entry["shape"])


def gguf_name_of(name: str) -> str:
    """Return what a checkpoint's tensor is called in a GGUF file."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE_LAYERS:
        return f"{OUTSIDE_LAYERS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{IN_LAYERS[part]}.{kind}"


def pairs_side_by_side(values: Any, head_dim: int) -> Any:
    """Return a projection [H * D, E] whose rotated pairs are neighbours instead of half a head apart."""
    rows, width = values.shape
    return values.reshape(rows // head_dim, 2, head_dim // 2, width).swapaxes(1, 2).reshape(rows, width)


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "openvino-fp16": partial(openvino, "fp16", ()),
    "openvino-int8": partial(openvino, "int8", ()),
    "openvino-int4": partial(openvino, "int4", INT4),
    "gguf-bf16": partial(gguf, "bf16"),
    "gguf-f16": partial(gguf, "f16"),
    "gguf-q8_0": partial(quantized_gguf, "q8_0"),
    "gguf-q4_0": partial(quantized_gguf, "q4_0"),
    **{f"random-{mix}": partial(random_gguf, mix) for mix in MIXES},
}


def place_of(form: str, model: Path, folder: Path) -> Path:
    """Return where a form of a checkpoint is kept."""
    return folder / f"{model.name}-{form}{'.gguf' if form.startswith(('gguf', 'random')) else ''}"


def ensure(form: str, model: Path, folder: Path, python: str) -> Path:
    """Return where a form of a checkpoint is, converted first by some interpreter where it is missing."""
    place = place_of(form, model, folder)
    if not place.exists():
        print(f"converting {model.name} to {form}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        # The name is given last, so that an interrupted conversion is not taken for a whole one.
        partly = place.with_name(f"partly-{place.name}")
        command = [python, "-m", "benchmarks.conversions", form, str(model), str(partly)]
        subprocess.run(command, check=True, cwd=Path(__file__).resolve().parent.parent)
        partly.rename(place)
    return place


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    FORMS[options.form](options.model, options.target)


if __name__ == "__main__":
    main()
