"""Models whose activations have outliers: no quantised path loses more than rounding activations in groups of 32.

The loss is the difference of all logits from those of the dequantised weights with exact activations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from quire.cli.quantization.paged_rows import run_sequences
from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.config import Quantization
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.ops.cpu.native_library import find_library
from quire.ops.interface.ops import Ops
from tests.engine.test_stored_quantization import METHODS, is_linear
from tests.models.gguf.writer import write_gguf
from tests.models.outliers import save_outliers
from tests.models.tiny import random_tokens
from tests.ops.outliers import MARGIN, RoundedOps, rms

NUM_TOKENS = 60
KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(isinstance(find_library(), str), reason="no native kernels")),
]


def logits(path: Path, kernels: str, quantization: Quantization | None = None, ops: Ops | None = None) -> Tensor:
    """Return the logits of two sequences."""
    decoder = load_decoder(
        Checkpoint.open(str(path)),
        device="cpu",
        dtype=torch.float32,
        kernels=kernels,
        quantization=quantization,
        wrap_ops=None if ops is None else lambda _: ops,
    )
    tokens = torch.tensor(random_tokens(NUM_TOKENS, 1) + random_tokens(NUM_TOKENS, 2))
    with torch.inference_mode():
        return decoder.logits(run_sequences(decoder, tokens, [NUM_TOKENS, NUM_TOKENS]))


def check_loss(path: Path, kernels: str, quantization: Quantization | None = None) -> None:
    exact, grouped = (logits(path, "torch", ops=RoundedOps(quantization, is_grouped=flag)) for flag in (False, True))
    loss, limit = rms(logits(path, kernels, quantization) - exact), rms(grouped - exact)
    assert 1e-4 * rms(exact) < limit < 0.2 * rms(exact), "the measure is of a model that works"
    assert loss <= MARGIN * limit, f"{loss / limit:.2f} times"


def of_file(name: str, kind: Type) -> Callable[[Path], Path]:
    """Return the maker of a GGUF file, of one type."""

    def make(folder: Path) -> Path:
        return write_gguf(save_outliers(name, folder / "plain"), folder / "model.gguf", lambda _, __: kind)

    return make


def of_experts_in_mxfp4(folder: Path) -> Path:
    plain = save_outliers("gpt-oss", folder / "plain")
    return write_gguf(plain, folder / "model.gguf", lambda name, _: Type.MXFP4 if "_exps" in name else Type.Q8_0)


def of_method(name: str) -> Callable[[Path], Path]:
    """Return the maker of a folder in the format of a method, such as GPTQ."""

    def make(folder: Path) -> Path:
        method, config = METHODS[name]
        plain = save_outliers("llama", folder / "plain")
        stored: dict[str, Tensor] = {}
        for key, tensor in load_file(plain / "model.safetensors").items():
            if not is_linear(key):
                stored[key] = tensor
                continue
            stored |= {key.removesuffix(".weight") + suffix: part for suffix, part in method(tensor)[0].items()}
        return save_outliers("llama", folder / "stored", stored, quantization_config=config)

    return make


def of_quantize(to: str, **options: Any) -> Callable[[Path], Path]:
    """Return the maker of what `quire quantize` writes."""

    def make(folder: Path) -> Path:
        plain = save_outliers("qwen3", folder / "plain")
        quantize(str(plain), folder / "stored", QuantizeOptions(to, **options))
        return folder / "stored"

    return make


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama-q8_0": of_file("llama", Type.Q8_0),
    "llama-q4_0": of_file("llama", Type.Q4_0),
    "gemma3-q5_0": of_file("gemma3", Type.Q5_0),
    "qwen3-q5_1": of_file("qwen3", Type.Q5_1),
    "mixtral-q8_0": of_file("mixtral", Type.Q8_0),
    "gpt-oss-mxfp4": of_experts_in_mxfp4,
    **{f"llama-{name}": of_method(name) for name in METHODS},
    "qwen3-int4": of_quantize("int4", method="rounded"),
    "qwen3-int8": of_quantize("int8"),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MAKERS)
def test_stored_weights(name: str, kernels: str, tmp_path: Path) -> None:
    check_loss(MAKERS[name](tmp_path), kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_weights_that_are_rounded_while_loading(
    name: str, quantization: Quantization, kernels: str, tmp_path: Path
) -> None:
    check_loss(save_outliers(name, tmp_path / "plain"), kernels, quantization)
