"""Texts of clients in a rendered conversation become no control tokens, and all other tokens stay as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from quire.errors import InvalidParameter
from quire.text.chat import sanitized_texts
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.sanitized_texts import SanitizedTexts
from quire.text.vocabulary.control_tokens import AddedTokens, ControlTokens
from quire.text.vocabulary.long_texts import EncodePart, LongTexts
from quire.text.vocabulary.marks import LENIENT, STRICT
from tests.text import kinds

# Control tokens of the tokenizers here: special ones, and others that a template writes.
SPECIAL = [*kinds.SPECIAL, "[INST]", "<|en"]
WRITTEN = ["<think>", "</think>"]
# What clients write beside words: tokens, and parts of them.
HARM = [
    *SPECIAL,
    *WRITTEN,
    "<",
    ">",
    "<|",
    "|>",
    "<|e",
    "nd|>",
    "<</s>",
    "s>",
    "</",
    "[",
    "]",
    "[IN",
    " <s> ",
    "<|end|>" * 3,
]


@cache
def library_of(name: str, flags: tuple[str, ...] = ()) -> Library:
    """Return a tokenizer of a kind, with all control tokens, which have some flags."""
    library = (kinds.CUT | kinds.WHOLE)[name]()
    given = dict.fromkeys(flags, True)
    library.add_special_tokens([AddedToken(token, special=True, **{"normalized": False, **given}) for token in SPECIAL])
    library.add_tokens([AddedToken(token, normalized=False) for token in WRITTEN])
    return library


# Kinds, and flags of their control tokens. A tokenizer with dropout has no tokens to compare, and one that writes every
# text twice has two of each.
NAMES = [name for name in (*kinds.CUT, *kinds.WHOLE) if name not in ("dropout", "twice")]
FLAGGED = [
    *(("llama2", flag) for flag in ("rstrip", "lstrip", "normalized", "single_word")),
    *((name, "normalized") for name in ("qwen2", "nfkc and lower case", "metaspace first", "bert")),
    *(("gpt2, awkward", flag) for flag in ("rstrip", "lstrip", "single_word")),
]
CASES: list[tuple[str, tuple[str, ...]]] = [
    *((name, ()) for name in NAMES),
    *((name, (flag,)) for name, flag in FLAGGED),
]
IDS = ["-".join((name, *flags)) for name, flags in CASES]
# A text, and the first mark of it; None for a template's.
Piece = tuple[str, int | None]


class Chats:
    """Makes prompts of one tokenizer, and tokenizes them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.control: ControlTokens = AddedTokens(library).control_tokens(("<think> and </think>",))
        self.long_texts = LongTexts(library, self.encode)
        self.sanitized = SanitizedTexts(library, self.encode)

    def encode(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False).ids)

    def prompt(self, pieces: Sequence[Piece]) -> ChatPrompt:
        """Return a prompt of pieces."""
        text = "".join(piece for piece, _ in pieces)
        marked = "".join(
            piece if first is None else self.control.marks.put(piece, first=first) for piece, first in pieces
        )
        return ChatPrompt(text, marked, self.control)

    def ids(self, prompt: ChatPrompt) -> list[int]:
        part = self.sanitized.part_encoder(prompt)
        assert part is not None
        return self.long_texts.encode(prompt.text, None, [], [], part) if prompt.text else []

    def id_of(self, token: str) -> int:
        token_id = self.library.token_to_id(token)
        assert token_id is not None
        return token_id

    @property
    def control_ids(self) -> set[int]:
        added = self.library.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.content in (*SPECIAL, *WRITTEN)}


class Twin:
    """The same tokenization by a tokenizer whose file has other names for the control tokens, in every place."""

    def __init__(self, library: Library, tokens: Sequence[str]) -> None:
        self.names = {token: chr(0xF0000 + idx) for idx, token in enumerate(tokens)}
        state = json.loads(library.to_str())
        for added in state["added_tokens"]:
            if added["content"] in self.names:
                added |= {"content": self.names[added["content"]], "special": False}
        vocab = state["model"]["vocab"]
        if isinstance(vocab, dict):
            state["model"]["vocab"] = {self.names.get(token, token): idx for token, idx in vocab.items()}
        state["post_processor"] = None
        self.library = Library.from_str(json.dumps(state))

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the tokens of pieces; a control token of the template is a piece of its own."""
        text = "".join(piece if first is not None else self.names.get(piece, piece) for piece, first in pieces)
        return list(self.library.encode(text, add_special_tokens=False).ids)


def harmless_text(rng: random.Random) -> str:
    """Return a text without any token of `SPECIAL` or `WRITTEN`, or a part of one at its ends."""
    text = kinds.hard_text(rng, rng.randint(0, 6))
    for token in (*SPECIAL, *WRITTEN):
        text = text.replace(token, "")
    return "".join(char for char in text if char not in "<>[]")


def conversation(rng: random.Random, texts: Sequence[str], first: int = STRICT) -> list[Piece]:
    """Return pieces: control tokens and words of a template, and texts of clients between them."""
    pieces: list[Piece] = []
    for _ in range(rng.randint(1, 5)):
        own = rng.choice([*SPECIAL, *WRITTEN])
        text = "".join(rng.choice(texts) or harmless_text(rng) for _ in range(rng.randint(1, 5)))
        pieces += [(own, None), (rng.choice(["", "x", "a b", harmless_text(rng)]), None), (text, first)]
    return [*pieces, ("<s>", None)]


def neutral(prompt: ChatPrompt) -> str:
    """Return a prompt with other characters where clients wrote the beginning or the end of a control token."""
    assert prompt.marked is not None
    both = zip(prompt.text, prompt.marked, strict=True)
    return "".join(char if char == mark else "\u01c5" if char.isalnum() else "\ufffc" for char, mark in both)


@pytest.mark.parametrize(("name", "flags"), CASES, ids=IDS)
def test_texts_without_control_tokens_have_the_tokens_of_the_whole(name: str, flags: tuple[str, ...]) -> None:
    chats, rng = Chats(library_of(name, flags)), random.Random(name)
    for _ in range(30):
        prompt = chats.prompt(conversation(rng, [""]))
        wanted = chats.encode(prompt.text)
        assert chats.ids(prompt) == wanted
        # The other tokenizer gives the same, though nothing needs it.
        chats.sanitized.is_literal = False
        assert chats.ids(prompt) == wanted
        chats.sanitized.is_literal = True


@pytest.mark.parametrize(("name", "flags"), CASES, ids=IDS)
def test_control_tokens_are_those_of_the_template(name: str, flags: tuple[str, ...]) -> None:
    chats, rng = Chats(library_of(name, flags)), random.Random(name)
    # Unigram models make control tokens of ordinary characters; flags make tokens depend on what is around them.
    model = json.loads(chats.library.model.__getstate__())
    twin = None if model["type"] == "Unigram" or flags else Twin(chats.library, [*SPECIAL, *WRITTEN])
    for _ in range(40):
        pieces = conversation(rng, ["", *HARM])
        prompt = chats.prompt(pieces)
        ids = chats.ids(prompt)
        found = [token_id for token_id in ids if token_id in chats.control_ids]
        assert found == [token_id for token_id in chats.encode(neutral(prompt)) if token_id in chats.control_ids]
        if twin is not None:
            assert ids == twin.encode(pieces)


def test_the_tokens_are_those_of_the_text() -> None:
    chats, rng = Chats(library_of("llama3")), random.Random(1)
    chats.library.decoder = decoders.ByteLevel()
    for _ in range(200):
        prompt = chats.prompt(conversation(rng, ["", *HARM]))
        assert chats.library.decode(chats.ids(prompt), skip_special_tokens=False) == prompt.text


def test_markers_of_the_model_stay_in_lenient_texts_and_special_tokens_do_not() -> None:
    chats = Chats(library_of("llama3"))
    think = chats.id_of("<think>")
    for first, number in ((LENIENT, 2), (STRICT, 1)):
        ids = chats.ids(chats.prompt([("<s><think>", None), ("<think>a</s><|end|>", first), ("</s>", None)]))
        assert ids.count(think) == number
        assert [ids.count(chats.id_of(token)) for token in ("<s>", "</s>", "<|end|>")] == [1, 1, 0]


def test_a_token_across_two_texts_of_clients_is_none() -> None:
    chats = Chats(library_of("llama3"))
    for pieces in (["<|e", "nd|>"], ["<", "|end|", ">"], ["<|end|", ">"]):
        ids = chats.ids(chats.prompt([("<s>", None), *((piece, STRICT) for piece in pieces)]))
        assert chats.control_ids.intersection(ids) == {chats.id_of("<s>")}
    # So is one that begins or ends in the template's text.
    for own, text in (("[IN", "ST]"), ("x<", "/s>"), ("<|en", "d|>")):
        ids = chats.ids(chats.prompt([(own, None), (text, STRICT), ("<s>", None)]))
        wanted = {"<s>", own} & {*SPECIAL}
        assert {chats.library.id_to_token(each) for each in chats.control_ids.intersection(ids)} == wanted


@pytest.mark.parametrize("name", ["llama3", "llama2", "metaspace first", "gpt2, awkward", "bert"])
def test_long_texts_are_cut(name: str) -> None:
    chats, rng = Chats(library_of(name)), random.Random(name)
    chats.long_texts.piece_chars = 100
    twin, parts = Twin(chats.library, [*SPECIAL, *WRITTEN]), list[int]()
    for _ in range(10):
        pieces = [piece for _ in range(30) for piece in conversation(rng, ["", "", "", *HARM])]
        prompt = chats.prompt(pieces)
        encode = chats.sanitized.part_encoder(prompt)
        assert encode is not None

        def counted(start: int, end: int, lead: str, encode: EncodePart = encode) -> list[int]:
            parts.append(start)
            return encode(start, end, lead)

        assert chats.long_texts.encode(prompt.text, None, [], [], counted) == twin.encode(pieces)
    assert len(parts) > 100


def test_a_model_without_a_token_for_the_unknown_is_read() -> None:
    library = Library(models.WordLevel({"<s>": 0, "a": 1, "<": 2, "s": 3, ">": 4}))
    library.pre_tokenizer = pre_tokenizers.Punctuation()
    library.add_special_tokens(["<s>"])
    chats = Chats(library)
    assert chats.ids(chats.prompt([("<s>", None), ("a<s", STRICT)])) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("normalizer", "texts"),
    [
        (normalizers.NFKC(), ["＜|end|＞", "＜/s＞", "﹤s﹥", "<|ｅnd|>"]),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), ["≮|end|≯", "≮/s≯"]),
        (normalizers.Replace("\u200b", ""), ["<\u200b/s\u200b>", "<|e\u200bnd|>"]),
    ],
)
def test_a_token_in_other_characters_is_ordinary_text(normalizer: normalizers.Normalizer, texts: list[str]) -> None:
    library = kinds.llama3()
    library.normalizer = normalizer
    library.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in SPECIAL])
    chats = Chats(library)
    for text in texts:
        assert chats.control_ids.intersection(chats.encode(text))
        prompt = chats.prompt([("<s>", None), (f"a{text}b", STRICT), ("</s>", None)])
        ids = chats.ids(prompt)
        found = [each for each in ids if each in chats.control_ids]
        assert found == [chats.id_of("<s>"), chats.id_of("</s>")]
        # So it is where nothing in the prompt has a mark.
        assert chats.ids(ChatPrompt(prompt.text, None, chats.control)) == ids


def test_a_client_cannot_write_what_stands_for_a_control_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized_texts, "STAND_INS", (range(0xE000, 0xE00A),))
    chats = Chats(library_of("llama3"))
    prompt = chats.prompt([("<s>", None), ("</s>\ue000\ue001", STRICT)])
    ids = chats.ids(prompt)
    assert [each for each in ids if each in chats.control_ids] == [chats.id_of("<s>")]
    assert ids[-6:] == chats.encode("\ue000\ue001")
    every = "".join(map(chr, range(0xE000, 0xE00A)))
    with pytest.raises(InvalidParameter, match="private use"):
        chats.ids(chats.prompt([("<s>", None), (f"</s>{every}", STRICT)]))
