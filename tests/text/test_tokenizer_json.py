"""Other processes read a tokenizer again from the model's files, unless these have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from quire.cli.quantization.gguf_header import encode_header
from quire.models.gguf.header import read_header
from quire.platform.bounded.process import RemoteCall
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.gguf_fields import tokenizer_fields
from tests.text.kinds import kind

TEXTS = ("The naïve fox, 1234.", " it's\n\n  you", "<s>你好</s>")


def check_same(call: RemoteCall, tokenizer: Tokenizer) -> None:
    """Check that a call's tokenizer gives the tokens of another one, those of long texts too."""
    library = tokenizers.Tokenizer.from_str(call())
    assert library.truncation is None
    assert library.padding is None
    for text in (*TEXTS, " ".join(TEXTS) * 20):
        assert library.encode(text).ids == tokenizer.encode(text)


@pytest.mark.parametrize("has_switches", [False, True], ids=["as written", "truncated and padded"])
def test_a_folder_is_read_again_unless_it_changed(has_switches: bool, tmp_path: Path) -> None:
    library, file = kind("llama3"), tmp_path / "tokenizer.json"
    if has_switches:
        library.enable_truncation(7)
        library.enable_padding(length=64)
    library.save(str(file))
    tokenizer = Tokenizer.from_folder(tmp_path)
    call = tokenizer.json_call()
    assert call.location.endswith(":of_file")
    assert (call() == file.read_text(encoding="utf-8")) == (not has_switches)
    check_same(call, tokenizer)
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed["model"]["merges"] = []
    file.write_text(json.dumps(changed), encoding="utf-8")
    call = tokenizer.json_call()
    assert call.location.endswith(":same")
    check_same(call, tokenizer)
    file.unlink()
    check_same(tokenizer.json_call(), tokenizer)


def test_a_gguf_file_is_read_again_with_its_pre_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(encode_header(tokenizer_fields(kind("llama3"), "gpt-2", None, "</s>"), []))
    fields = read_header(path).fields
    for pre in (None, "llama-bpe"):
        tokenizer = Tokenizer.from_files(read_gguf_tokenizer(path, fields, pre))
        call = tokenizer.json_call()
        assert call.location.endswith(":of_gguf")
        check_same(call, tokenizer)


def test_a_tokenizer_without_a_file_is_written() -> None:
    tokenizer = Tokenizer(kind("llama3"))
    call = tokenizer.json_call()
    assert call.location.endswith(":same")
    check_same(call, tokenizer)
