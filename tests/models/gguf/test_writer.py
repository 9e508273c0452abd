"""The files of the tests: of the types that are asked for, and the models that transformers reads from them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from tests.models.gguf.cases import save_checkpoint
from tests.models.gguf.writer import f32, write_gguf
from tests.models.tiny import random_tokens, reference_logits
from tests.server import checkpoint


# Other cases have fields that transformers does not read: rotations of Llama 3, sizes of heads, scales of scores.
@pytest.mark.parametrize("name", ["llama", "mistral-head-dim", "qwen2", "lfm2", "qwen3.5"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It refuses to read files without a package that it does not use for them.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)
    model = save_checkpoint(name, tmp_path)
    vocabulary = {f"token {number}": number for number in range(model.config.vocab_size)}
    tokenizer = {"added_tokens": [], "model": {"vocab": vocabulary, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_gguf(tmp_path, tmp_path / "model.gguf", f32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokens = random_tokens(30)
    torch.testing.assert_close(reference_logits(read, tokens), reference_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_files_of_other_types(tmp_path: Path) -> None:
    """The writer gives matrices the types that it is asked for, and the file a tokenizer."""
    path = tmp_path / "types"
    save_checkpoint("qwen3", path)
    kinds = {"attn_q": Type.Q8_0, "attn_k": Type.Q4_0, "attn_v": Type.F16, "ffn_up": Type.BF16}

    def type_of(name: str, _shape: tuple[int, ...]) -> Type:
        return next((kind for part, kind in kinds.items() if f".{part}." in name), Type.F32)

    reader = gguf.GGUFReader(write_gguf(path, path / "model.gguf", type_of))
    found = {each.name: each.tensor_type for each in reader.tensors}
    assert {part: found[f"blk.1.{part}.weight"] for part in kinds} == kinds
    saved = checkpoint.save(tmp_path / "server")
    reader = gguf.GGUFReader(write_gguf(saved, tmp_path / "server.gguf", type_of, pre="llama-bpe"))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"])
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == "<|eos|>"
    assert fields["tokenizer.ggml.merges"][0] == "Ġ w"
