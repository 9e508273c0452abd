"""Architectures of GGUF files: the specification and the tensors of the checkpoint that a file was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from quire.models.families import build
from quire.models.families.expert_layout import LINEAR_EXPERTS, has_linear_experts
from quire.models.families.qwen3_next import SPLIT_INPUTS
from quire.models.gguf.architectures import TensorSource, read_architecture
from quire.models.modules.decoder import Decoder
from quire.ops import make_ops
from tests.models.gguf.cases import GGUF_CASES, config_of, save_checkpoint
from tests.models.gguf.writer import f32, write_gguf
from tests.models.tiny import PagedRun, fill, random_tokens, reference_logits, with_rows_of_columns

# Multipliers that files have in their weights.
FALCON_H1 = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0, 1.0],
}
# Name of a family -> fields of configurations that are made of its files.
STORED_OTHERWISE: dict[str, dict[str, Any]] = {
    "FalconH1ForCausalLM": FALCON_H1,
    "GptOssForCausalLM": {LINEAR_EXPERTS: True},
    "GraniteMoeForCausalLM": {LINEAR_EXPERTS: True},
    "GraniteMoeHybridForCausalLM": {LINEAR_EXPERTS: True},
    "GraniteMoeSharedForCausalLM": {LINEAR_EXPERTS: True},
    "Llama4ForCausalLM": {LINEAR_EXPERTS: True},
    "Qwen3NextForCausalLM": {SPLIT_INPUTS: True},
}
# Language models that files describe as a part of the model that reads images.
WHOLE_MODELS = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


class Written(NamedTuple):
    """A file, as the library of the format reads it, and what it was made of."""

    model: PreTrainedModel
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    fields: dict[str, Any]
    stored: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(values.shape) for name, values in self.stored.items()}

    def floats(self, name: str) -> list[float]:
        return [float(value) for value in self.stored[name]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module", params=GGUF_CASES)
def written(request: pytest.FixtureRequest, folder: Path) -> Written:
    return write(request.param, folder / request.param)


def write(name: str, folder: Path) -> Written:
    model = save_checkpoint(name, folder)
    reader = gguf.GGUFReader(write_gguf(folder, folder / "model.gguf", f32))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    stored = {each.name: torch.tensor(each.data.copy()) for each in reader.tensors}
    tensors = with_rows_of_columns(type(model).__name__, load_file(folder / "model.safetensors"))
    config = config_of(folder) | ({LINEAR_EXPERTS: True} if has_linear_experts(tensors) else {})
    if type(model).__name__ in WHOLE_MODELS:
        config, tensors = _as_part(type(model).__name__, config, tensors)
    return Written(model, config, tensors, fields, stored)


def _as_part(name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a language model as those of a part of the whole."""
    outer: dict[str, Any] = {each: config[each] for each in ("tie_word_embeddings", LINEAR_EXPERTS) if each in config}
    whole = {"architectures": [WHOLE_MODELS[name]], "text_config": config, **outer}
    return whole, {re.sub(r"^model\.", "model.language_model.", each): values for each, values in tensors.items()}


def read(source: TensorSource, stored: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a source, in the order of its fields."""
    values = stored[source.name]
    if source.rows is not None:
        values = values[source.rows.start : source.rows.start + source.rows.num_rows]
    if source.expert is not None:
        values = values[source.expert]
    if source.row_order is not None:
        values = values[source.row_order.indices()]
    if source.column_order is not None:
        values = values[:, source.column_order.indices()]
    if source.transform == "minus_one":
        values = values - 1
    elif source.transform == "log_negated":
        values = values.neg().log()
    return values.reshape(source.shape)


def test_specification(written: Written) -> None:
    config, sources = read_architecture(written.fields, written.shapes, written.floats)
    expected, expected_names = build(written.config | STORED_OTHERWISE.get(written.config["architectures"][0], {}))
    spec, names = build(config)
    assert spec == expected
    assert names == expected_names
    assert sources.keys() == {source for parts in names.values() for source in parts}


def test_tensors(written: Written) -> None:
    """All tensors come back bit for bit, except logarithms and tensors with multipliers."""
    _, sources = read_architecture(written.fields, written.shapes, written.floats)
    if not sources.keys() <= written.tensors.keys() or "mamba_d_ssm" in written.config:  # other names, or multipliers
        sources = {name: parts for name, parts in sources.items() if name.endswith(("norm.weight", "mamba.D"))}
    assert sources.keys() <= written.tensors.keys()
    for name, parts in sources.items():
        values = torch.cat([read(part, written.stored) for part in parts])
        if name.endswith("A_log"):
            torch.testing.assert_close(values, written.tensors[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(values.view_as(written.tensors[name]), written.tensors[name]), name


def test_logits(written: Written) -> None:
    config, sources = read_architecture(written.fields, written.shapes, written.floats)
    spec, names = build(config)
    decoder = Decoder(spec, ops=make_ops(torch.device("cpu")), dtype=torch.float32, device=torch.device("cpu"))
    tensors = {name: torch.cat([read(part, written.stored) for part in parts]) for name, parts in sources.items()}
    fill(decoder, names, tensors)
    tokens = random_tokens(40)
    expected = reference_logits(written.model, tokens)
    torch.testing.assert_close(PagedRun(decoder).step({0: tokens})[0], expected, rtol=1e-3, atol=1e-3)
