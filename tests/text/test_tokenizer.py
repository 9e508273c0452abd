"""Tokenizers are read from a folder, keep to their bytes and refuse what is not text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from quire.errors import CheckpointError, InvalidParameter, UnsupportedFeature
from quire.text.tokenizers.tokenizer import Tokenizer


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """Lay out a checkpoint's tokenizer files."""
    tokenizer._library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_gives_the_same_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<|end|>", "model_max_length": 10}
    read = Tokenizer.from_folder(write(tmp_path, byte_level, config))
    text = "naïve café 你好 <|end|> 🎉"
    assert read.encode(text) == byte_level.encode(text)
    assert read.decode(read.encode(text), skip_special_tokens=False) == text
    assert read.decode(read.encode(text)) == text.replace("<|end|>", "")
    assert read.token_text(read.bos_token_id or 0) == "<s>"
    assert read.token_text(read.eos_token_id or 0) == "<|end|>"
    assert read.vocab_size == byte_level.vocab_size
    assert {read.token_text(token_id) for token_id in read.special_ids} == {"<s>", "</s>", "<|end|>"}


def test_a_tokenizer_needs_no_configuration(tmp_path: Path, byte_level: Tokenizer) -> None:
    read = Tokenizer.from_folder(str(write(tmp_path, byte_level)))
    assert (read.bos_token_id, read.eos_token_id, read.chat_template) == (None, None, None)


def test_truncation_and_padding_of_the_training_run_are_off(byte_level: Tokenizer) -> None:
    library = Library.from_str(byte_level._library.to_str())
    library.enable_truncation(3)
    library.enable_padding(length=64)
    text = "one two three four five six seven"
    assert Tokenizer(library).encode(text) == byte_level.encode(text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "not json"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, byte_level: Tokenizer, name: str, content: str) -> None:
    write(tmp_path, byte_level)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_needs_neighbours_is_refused() -> None:
    library = Library(models.BPE(vocab={"a</w>": 0}, merges=[]))
    library.decoder = decoders.BPEDecoder()
    with pytest.raises(CheckpointError, match="BPEDecoder"):
        Tokenizer(library)


def test_chat_templates_are_found_where_models_keep_them(tmp_path: Path, byte_level: Tokenizer) -> None:
    def rendered(tools: Any = None) -> str:
        template = Tokenizer.from_folder(tmp_path).chat_template
        assert template is not None
        return template.render([{"role": "user", "content": ""}], tools=tools)

    write(tmp_path, byte_level, {"chat_template": "{{ bos_token }}one", "bos_token": "<s>"})
    assert rendered() == "<s>one"
    two = "two{{ tools[0].name }}{{ pad_token }}"
    named = [{"name": "tool_use", "template": two}, {"name": "default", "template": "three{{ pad_token }}"}]
    write(tmp_path, byte_level, {"chat_template": named, "pad_token": {"content": "<pad>"}})
    assert rendered() == "three<pad>"
    assert rendered([{"name": "f"}]) == "twof<pad>"
    (tmp_path / "chat_template.jinja").write_text("four", encoding="utf-8")
    assert rendered() == "four"
    with pytest.raises(UnsupportedFeature, match="tools"):
        rendered([{"name": "f"}])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("five{{ tools[0].name }}", encoding="utf-8")
    assert rendered() == "four"
    assert rendered([{"name": "f"}]) == "fivef"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_not_unicode_is_refused(every_tokenizer: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in every_tokenizer.values():
        with pytest.raises(InvalidParameter, match="prompt must be Unicode text"):
            tokenizer.encode(text)


@pytest.mark.parametrize("text", [None, b"bytes", ["a"], 3])
def test_what_is_not_a_string_is_refused(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidParameter, match="prompt must be a string"):
        byte_level.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_what_cannot_be_a_token_id_is_refused(byte_level: Tokenizer, ids: Any) -> None:
    with pytest.raises(InvalidParameter, match="token_ids"):
        byte_level.decode(ids)


def test_ids_without_a_token_have_no_text(every_tokenizer: dict[str, Tokenizer]) -> None:
    for tokenizer in every_tokenizer.values():
        missing = tokenizer.vocab_size + 7
        assert tokenizer.token_bytes(missing) == b""
        assert tokenizer.token_text(missing) == ""
        assert tokenizer.decode([missing]) == ""


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == text.encode()
    assert byte_level.decode(ids, skip_special_tokens=False) == text


REDOS = Regex("(a+)+b$")


def test_a_panic_of_the_library_is_an_error_like_others(byte_level: Tokenizer) -> None:
    library = Library.from_str(byte_level._library.to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(REDOS, "isolated"), library.pre_tokenizer])
    tokenizer = Tokenizer(library)
    assert tokenizer.encode("hello") == byte_level.encode("hello")
    for text in ("a" * 40, "hello " * 20_000 + "a" * 40):
        with pytest.raises(InvalidParameter, match="the tokenizer library gave up"):
            tokenizer.encode(text)


def test_a_decoder_that_fails_on_a_token_costs_that_token_only() -> None:
    names = ["b", "a" * 40]
    library = Library(models.BPE(vocab={name: token_id for token_id, name in enumerate(names)}, merges=[]))
    library.decoder = decoders.Replace(REDOS, "x")
    tokenizer = Tokenizer(library)
    with pytest.raises(InvalidParameter, match="token ids that the tokenizer can decode"):
        tokenizer.decode([1])
    assert [tokenizer.token_text(token_id) for token_id in (0, 1)] == ["b", "\ufffd"]
    assert tokenizer.head_bytes(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer"),
        ({"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}}, "decoder's content"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 10**6, "stop": 0}}, "decoder's start"),
        ({"added_tokens": [{"id": 2**32}]}, "not a tokenizer"),
    ],
)
def test_a_tokenizer_that_would_do_harm_is_refused(
    tmp_path: Path, byte_level: Tokenizer, change: dict[str, Any], says: str
) -> None:
    path = write(tmp_path, byte_level) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_special_tokens_and_names_of_templates_may_be_anything(tmp_path: Path, byte_level: Tokenizer) -> None:
    named = [{"name": [], "template": "one"}, {"name": "default", "template": "two"}, 3]
    write(tmp_path, byte_level, {"chat_template": named, "bos_token": {"content": 3}, "eos_token": ["<s>"]})
    read = Tokenizer.from_folder(tmp_path)
    assert (read.bos_token_id, read.eos_token_id) == (None, None)
    assert read.chat_template is not None
    assert read.chat_template.source == "two"
    for name, value in (("bos_token", "\ud800"), ("chat_template", "x" * (2 << 20))):
        write(tmp_path, byte_level, {name: value})
        with pytest.raises(CheckpointError):
            Tokenizer.from_folder(tmp_path)


def test_every_byte_has_its_token(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        owned = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= owned


def test_tokens_are_written_as_they_stand_inside_a_text(
    byte_fallback: Tokenizer, word_piece: Tokenizer, metaspace: Tokenizer
) -> None:
    def texts(tokenizer: Tokenizer, tokens: list[str]) -> list[str]:
        vocab = tokenizer._library.get_vocab()
        return [tokenizer.token_text(vocab[token]) for token in tokens]

    assert texts(byte_fallback, ["▁the", "▁▁", "he", "<0x0A>", "<0xE4>", "</s>"]) == [
        " the", "  ", "he", "\n", "\ufffd", "</s>",
    ]  # fmt: skip
    assert texts(word_piece, ["dog", "##s", ".", "n't", "[UNK]"]) == [" dog", "s", ".", "n't", " [UNK]"]
    assert texts(metaspace, ["▁the", "▁", "a"]) == [" the", " ", "a"]


def test_an_added_token_with_characters_outside_the_alphabet_keeps_them(byte_level: Tokenizer) -> None:
    library = Library.from_str(byte_level._library.to_str())
    library.add_tokens([AddedToken("é<x>", normalized=False), AddedToken("世 界", normalized=False)])
    tokenizer = Tokenizer(library)
    for added in ("é<x>", "世 界"):
        token_id = library.get_vocab()[added]
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id])
