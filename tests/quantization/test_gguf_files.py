"""GGUF files that `quire quantize` writes: the same model, the same tokenizer, and a header that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from tokenizers import AddedToken

from quire.cli.quantization.gguf_vocabulary import tokenizer_fields
from quire.cli.quantization.paged_rows import run_sequences
from quire.cli.quantization.quantize import QuantizeOptions, quantize
from quire.engine.llm import LLM
from quire.errors import UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.loading.loading import load_decoder
from quire.sequences.params import SamplingParams
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, ROWS
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.conformance.checkpoints import FAMILIES, LLAMA3_ROPE, ragged_prompts, save_checkpoint
from tests.text.test_gguf_tokenizer import byte_level, sentencepiece, texts

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {}),
    "llama3": ("llama3", {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}}),
    "llama-bias": ("llama2", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "llama-yarn": ("llama2", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral-window", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama3-context": ("llama3", {}, "factors of no known scaling"),
    "qwen2-window": ("qwen2-window", {}, "layer 1, LayerSpec"),
    "gemma3": ("gemma3", {}, "written are LlamaForCausalLM"),
}


def make(family: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a checkpoint with the bundled tokenizer."""
    name, options = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, "changed", (name, {**options, "vocab_size": 2060, **changes}))
    save_checkpoint("changed", folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((locate("bundled") / file).read_bytes())
    return folder


def hidden_states(model: Path) -> torch.Tensor:
    decoder = load_decoder(Checkpoint.open(str(model)), device="cpu", dtype=torch.float32)
    sequences = ragged_prompts()
    ids = torch.tensor([token_id for each in sequences for token_id in each])
    with torch.inference_mode():
        return decoder.logits(run_sequences(decoder, ids, [len(each) for each in sequences]))


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_is_the_same_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(*CHANGES[case], tmp_path / "source", monkeypatch)
    out = tmp_path / "out.gguf"
    quantize(str(folder), out, QuantizeOptions("f32"))
    assert torch.equal(hidden_states(out), hidden_states(folder))
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.architecture"].contents() == case[:5].replace("mistr", "llama")
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    assert sum(tensor.n_bytes for tensor in reader.tensors) < out.stat().st_size


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes, message = REFUSED[case]
    folder = make(family, changes, tmp_path / "source", monkeypatch)
    with pytest.raises(UnsupportedModel, match=message):
        quantize(str(folder), tmp_path / "out.gguf", QuantizeOptions("q8_0"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_types_of_a_mix(tmp_path: Path) -> None:
    quantize("bundled", tmp_path / "a.gguf", QuantizeOptions("q4_k_m"))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["output_norm.weight"] == "F32"
    assert [types[f"blk.{idx}.attn_v.weight"] for idx in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    # Rows of 704 values are no multiple of 256.
    assert [types[f"blk.{idx}.ffn_down.weight"] for idx in range(4)] == ["Q5_0", "Q5_0", "Q8_0", "Q8_0"]
    assert {types[f"blk.{idx}.ffn_up.weight"] for idx in range(4)} == {"Q4_K"}


def test_the_bundled_model_is_served_with_its_tokenizer(tmp_path: Path) -> None:
    """With the sampling parameters that it recommends, too."""
    out = tmp_path / "bundled.gguf"
    quantize("bundled", out, QuantizeOptions("bf16"))
    greedy = SamplingParams(temperature=0)
    messages = [{"role": "user", "content": "Where do penguins live?"}]
    with LLM("bundled", num_kv_blocks=64, max_model_len=256) as llm:
        expected = llm.chat(messages, greedy)[0]
        defaults = llm.get_default_sampling_params()
    with LLM(str(out), num_kv_blocks=64, max_model_len=256) as llm:
        found = llm.chat(messages, greedy)[0]
        assert llm.generate("Once upon a time")[0].prompt_token_ids[0] == 0
        assert llm.get_default_sampling_params() == defaults
        assert (defaults.temperature, defaults.top_p) == (0.5, 0.9)
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs[0].finish_reason == expected.outputs[0].finish_reason == "stop"


def wrapped(library: tokenizers.Tokenizer, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    return Tokenizer(library, bos_token=bos, eos_token=eos)


@pytest.mark.parametrize("name", [names[0] for _, names in ROWS])
def test_byte_level_tokenizers(name: str) -> None:
    tokenizer = wrapped(byte_level(name), eos="<|end|>")
    fields = tokenizer_fields(tokenizer, tokenizer.vocab_size + 3, (5, 6))
    found = PRE_TOKENIZERS[str(fields["tokenizer.ggml.pre"])]
    assert found._replace(adds_bos=False) == PRE_TOKENIZERS[name]._replace(adds_bos=False)  # a field says that
    ends = [fields[f"tokenizer.ggml.{each}_token_id"] for each in ("eos", "eot", "eom")]
    assert ends == [tokenizer.eos_token_id, 5, 6]
    other = Tokenizer.from_files(read_gguf_tokenizer(Path("file"), fields))
    for text in texts(100):
        assert other.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_tokenizers(adds_space: bool) -> None:
    library, _ = sentencepiece(adds_space=adds_space)
    tokenizer = wrapped(library, "<s>", "</s>")
    fields = tokenizer_fields(tokenizer, tokenizer.vocab_size, ())
    other = Tokenizer.from_files(read_gguf_tokenizer(Path("file"), fields))
    for text in texts(100):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(other.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_tokenizers_that_files_cannot_have_are_refused() -> None:
    changed = json.loads(byte_level("qwen2").to_str())
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\d{1,2}|\D+"}
    divided = wrapped(tokenizers.Tokenizer.from_str(json.dumps(changed)))
    with pytest.raises(UnsupportedModel, match="divides texts by"):
        tokenizer_fields(divided, 10_000, ())
    stripping = tokenizers.Tokenizer.from_str(byte_level("gpt-2").to_str())
    stripping.add_special_tokens([AddedToken("e", normalized=False, lstrip=True, rstrip=True)])
    with pytest.raises(UnsupportedModel, match="read as another"):
        tokenizer_fields(wrapped(stripping), 10_000, ())
    with pytest.raises(UnsupportedModel, match=r"4 end tokens, of which the file would lose \[4\]"):
        tokenizer_fields(wrapped(byte_level("gpt-2")), 10_000, (1, 2, 3, 4))
    with pytest.raises(UnsupportedModel, match="tokens"):
        tokenizer_fields(wrapped(byte_level("gpt-2")), 10, ())
