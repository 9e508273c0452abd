"""Models of GGUF files as they are served: the values of the file, whatever its types, and kernels near them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from quire.measurement.bench.exact_ops import ExactOps
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.gguf.architectures import read_architecture
from quire.models.loading.loading import load_decoder
from quire.models.loading.weights import load_weights
from quire.models.modules.decoder import Decoder
from quire.ops.interface.ops import Ops
from quire.ops.reference.reference_ops import ReferenceOps
from tests.models.gguf.cases import GGUF_CASES, save_checkpoint
from tests.models.gguf.test_architectures import read
from tests.models.gguf.writer import TypeOf, f32, write_gguf
from tests.models.tiny import PagedRun, fill, random_tokens, reference_logits

CPU = torch.device("cpu")


def mixed(name: str, shape: tuple[int, ...]) -> Type:
    """Mix types as files do: others for values, downs, the head, and the halves of one gated layer."""
    if shape[-1] % 32:  # as converters do with rows that no block divides
        return Type.F16
    if "attn_v" in name or "ffn_down" in name or name.startswith(("output", "token_embd")):
        return Type.Q8_0
    if "ffn_up" in name and ".1." in name:
        return Type.Q5_1
    return Type.Q4_0 if "attn_k" in name else Type.Q5_0


def stored_decoder(path: Path, ops: Ops) -> Decoder:
    """Return the decoder that serves a file."""
    checkpoint = Checkpoint.open(str(path))
    spec, weight_map = build(checkpoint.config)
    decoder = Decoder(spec, ops=ops, dtype=torch.float32, device=CPU)
    load_weights(checkpoint, weight_map, decoder)
    return decoder


def plain_decoder(path: Path) -> Decoder:
    """Return a decoder with the values that the gguf package reads in a file, in float32."""
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    stored = {each.name: _values(each) for each in reader.tensors}
    config, sources = read_architecture(
        fields, {name: tuple(values.shape) for name, values in stored.items()}, lambda name: stored[name].tolist()
    )
    spec, weight_map = build(config)
    decoder = Decoder(spec, ops=ReferenceOps(), dtype=torch.float32, device=CPU)
    tensors = {name: torch.cat([read(part, stored) for part in parts]) for name, parts in sources.items()}
    fill(decoder, weight_map, tensors)
    return decoder


def _values(tensor: gguf.ReaderTensor) -> Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.tensor(values.reshape(tensor.shape[::-1].tolist()))


@pytest.mark.parametrize("type_of", [f32, mixed])
@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_are_those_of_the_values(name: str, type_of: TypeOf, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", type_of)
    tokens = random_tokens(20, 1)
    found, expected = (
        PagedRun(decoder).step({0: tokens})[0] for decoder in (stored_decoder(path, ExactOps()), plain_decoder(path))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "lfm2", "qwen3-moe", "qwen3.5", "granite4", "phi3", "gpt-oss"]
)
def test_kernels_are_near(name: str, tmp_path: Path) -> None:
    """Weights in eight bits and rows rounded to int8 move logits by a few percent of their spread."""
    model = save_checkpoint(name, tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", lambda _, shape: Type.F16 if shape[-1] % 32 else Type.Q8_0)
    decoder = load_decoder(Checkpoint.open(str(path)), device="cpu", dtype=torch.float32)
    tokens = random_tokens(30, 1)
    found, expected = PagedRun(decoder).step({0: tokens})[0], reference_logits(model, tokens)
    assert (found - expected).std() < 0.2 * expected.std()
