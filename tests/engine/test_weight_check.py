"""A model that no memory here can hold is refused before its weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from quire import LLM, ConfigError
from quire.config import ModelConfig, ParallelConfig
from quire.config.probed import Machine
from quire.engine.startup import loading, weight_check
from quire.engine.startup.weight_check import check_weights
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from tests.conformance.checkpoints import save_checkpoint
from tests.models.gguf.writer import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama3", tmp_path_factory.mktemp("weights")))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that sets the bytes that the machine has, and those of its swap space."""

    def has(available_bytes: int, free_swap_bytes: int = 0) -> None:
        def probe(device: str) -> Machine:
            return Machine(device=device, available_bytes=available_bytes, num_threads=1, total_bytes=1 << 40)

        monkeypatch.setattr(weight_check, "probe", probe)
        monkeypatch.setattr(weight_check, "swap_bytes", lambda: free_swap_bytes)

    return has


def least(folder: str, device: str, dtype: torch.dtype, machine: Any, **options: Any) -> int:
    """Return the bytes below which a model is refused, by halving."""
    model, checkpoint = ModelConfig(model=folder, **options), Checkpoint.open(folder)
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        machine(middle)
        try:
            check_weights(model, ParallelConfig(), checkpoint, device, dtype)
            high = middle
        except ConfigError:
            low = middle + 1
    return low


@pytest.mark.parametrize(
    ("device", "dtype", "packing", "share"),
    [
        ("cuda", torch.float32, "auto", 1.0),
        ("cpu", torch.float32, "auto", 1.0),
        ("cpu", torch.bfloat16, "plain", 1.0),
        ("cpu", torch.bfloat16, "auto", 0.75),
    ],
)
def test_the_bound_is_what_the_matrices_take(
    device: str, dtype: torch.dtype, packing: str, share: float, folder: str, machine: Any
) -> None:
    """All that the checkpoint stores but vectors; on a CPU without the table, which may lie in the host's pages."""
    shapes = {name: info.shape for name, info in Checkpoint.open(folder).tensors.items() if len(info.shape) == 2}
    if device == "cpu":
        del shapes["model.embed_tokens.weight"]
    stored = sum(rows * columns for rows, columns in shapes.values()) * dtype.itemsize
    assert least(folder, device, dtype, machine, weight_packing=packing) == int(share * stored)


def test_a_model_that_does_not_fit_is_refused_with_what_does(folder: str, machine: Any) -> None:
    plain, rounded = (least(folder, "cpu", torch.float32, machine, **each) for each in ({}, {"quantization": "int8"}))
    assert rounded < plain
    machine(plain - 1)
    with pytest.raises(ConfigError, match=rf"at least {plain:,} bytes, .* quantization 'int8' takes {rounded:,}") as no:
        LLM(model=folder, skip_tokenizer_init=True, dtype="float32")
    assert no.value.field == "model"
    machine(0)
    with pytest.raises(ConfigError, match=r"has 0 to spare; take a smaller model$"):
        LLM(model=folder, skip_tokenizer_init=True, dtype="float32")
    machine(1, plain)
    with LLM(model=folder, skip_tokenizer_init=True, dtype="float32") as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)[0].outputs[0].token_ids


def test_a_gguf_file_takes_about_its_bytes(machine: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    path = str(write_gguf(locate("bundled"), file, lambda *_: GGMLQuantizationType.Q8_0, pre="gpt-2"))
    found = least(path, "cpu", torch.bfloat16, machine)
    tensors = Checkpoint.open(path).tensors.items()
    assert found == sum(tensor.num_bytes for name, tensor in tensors if len(tensor.shape) > 1 and "embed" not in name)
    assert 0.4 * file.stat().st_size < found < file.stat().st_size
    machine(found - 1)
    with pytest.raises(ConfigError, match=r"does not fit: .* to spare; take a smaller model$"):
        LLM(model=path)
    machine(1 << 30)
    with LLM(model=path) as llm:
        assert llm.generate("Once", use_tqdm=False)[0].outputs[0].text


def test_ranks_have_parts(folder: str, machine: Any) -> None:
    checkpoint, model = Checkpoint.open(folder), ModelConfig(model=folder)
    machine(least(folder, "cuda", torch.float32, machine) * 2 // 3)
    check_weights(model, ParallelConfig(tensor_parallel_size=2), checkpoint, "cuda", torch.float32)
    with pytest.raises(ConfigError, match="or divide it with tensor_parallel_size"):
        check_weights(model, ParallelConfig(), checkpoint, "cuda", torch.float32)


def test_a_gpu_that_runs_out_of_memory_while_an_engine_starts_is_a_config_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(loading, "load_decoder", fails)
    with pytest.raises(ConfigError, match="does not start: CUDA out of memory; use a quantization") as caught:
        LLM(model=folder, skip_tokenizer_init=True)
    assert caught.value.field == "model"
