"""Files of llama.cpp's own converter have transformers' logits, and its vocabularies give the tokens that it lists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.gguf.reader import GGUFFile
from quire.models.loading.loading import load_decoder
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from tests.models.gguf.cases import GGUF_CASES, config_of, save_checkpoint
from tests.models.tiny import PagedRun, random_tokens, reference_logits
from tests.published.folders import LLAMA_CPP, named

# Cases that it refuses: sizes that it takes for granted, and fields that its files do not have.
REFUSED = {"gemma3n-options", "lfm2-options", "granite4-attention", "nemotron-h", "nemotron-h-moe", "falcon-h1-options"}
# Cases of which its files lack something, or have it otherwise than transformers.
OTHERWISE = {
    "mistral-window": "no window",
    "glm": "another epsilon",
    "phi3-longrope": "a factor of attention that follows from the lengths",
    "gemma3-options": "windows in the published pattern",
    "gemma3n": "zeros for tokens without inputs of layers, where transformers takes those of token 0",
    "granite4": "one width for dense and shared MLPs",
    "granite4-options": "no rotation beside recurrent layers",
}
# Vocabularies of models that are not read.
UNREAD = {"ggml-vocab-bert-bge.gguf", "ggml-vocab-falcon.gguf", "ggml-vocab-mpt.gguf"}
SEPARATOR = "\n__ggml_vocab_test__\n"


def root() -> Path:
    folder = named(LLAMA_CPP)
    assert folder is not None
    return folder


@pytest.mark.parametrize("options", [(), ("--fuse-qkv",)], ids=["split", "fused"])
@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_are_those_of_transformers(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    model, file = save_checkpoint(name, tmp_path / "folder"), tmp_path / "model.gguf"
    as_published(name, model.config.to_dict(), tmp_path / "folder")
    command = [sys.executable, "-m", "tests.published.converter", str(root()), str(tmp_path / "folder"), str(file)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == (name in REFUSED), done.stderr[-2000:]
    if name in REFUSED:
        return
    tokens = random_tokens(20, 1)
    with torch.inference_mode():
        expected = reference_logits(model, tokens)
    try:
        decoder = load_decoder(Checkpoint.open(str(file)), device="cpu", dtype=torch.float32, kernels="reference")
    except CheckpointError:
        assert name in OTHERWISE
        return
    with torch.inference_mode():
        found = PagedRun(decoder).step({0: tokens})[0]
    difference = (found - expected).std() / expected.std()
    assert difference > 1e-4 if name in OTHERWISE else difference < 1e-5


def as_published(name: str, whole: dict[str, Any], folder: Path) -> None:
    """Give a folder the names of fields that published ones have, and a tokenizer, which the converter looks for."""
    config = config_of(folder)
    if name.startswith("granite4"):
        kinds = {"full_attention": "attention", "linear_attention": "mamba"}
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
    if name.startswith(("falcon", "gpt2")):
        config = json.loads(json.dumps(whole)) | {"architectures": config["architectures"]}
        width, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
        config |= {"n_ctx": 128} if name.startswith("gpt2") else {"head_dim": width // heads}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {f"token {number}": number for number in range(211)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens, "merges": []}, "added_tokens": []}))


def vocabularies() -> list[str]:
    folder = named(LLAMA_CPP)
    files = [] if folder is None else sorted((folder / "models").glob("ggml-vocab-*.gguf"))
    return [file.name for file in files if file.with_name(f"{file.name}.inp").is_file()]


@pytest.mark.parametrize("name", vocabularies())
def test_tokens_are_those_of_the_vocabulary(name: str) -> None:
    path = root() / "models" / name
    fields = GGUFFile.open(path).fields
    if name in UNREAD:
        with pytest.raises(UnsupportedModel):
            read_gguf_tokenizer(path, fields)
        return
    library = read_gguf_tokenizer(path, fields).library
    texts = path.with_name(f"{name}.inp").read_text("utf-8").split(SEPARATOR)
    lines = path.with_name(f"{name}.out").read_text("utf-8").split("\n")
    wrong = {
        text: (found, line)
        for text, line in zip(texts, lines, strict=False)
        # llama.cpp does not normalise texts, as Qwen's tokenizers do.
        if (library.normalizer is None or is_normalized("NFC", text))
        and (found := library.encode(text, add_special_tokens=False).ids) != [*map(int, line.split())]
    }
    assert not wrong
