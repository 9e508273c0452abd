"""Tokenization of rendered conversations so that texts of clients never become control tokens.

A tokenizer first matches its added tokens in a text. A second tokenizer with the same model, normalizer and
pre-tokenizer, but without the control tokens, does not match these, and finds the same other tokens. The template's own
control tokens are replaced by stand-ins: characters that the text does not have. The tokenizers share their parts, so
the second one is cheap to make for each text that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Final, NamedTuple

import tokenizers
from tokenizers import AddedToken, models

from quire.errors import InvalidParameter
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.vocabulary.components import guarded
from quire.text.vocabulary.control_tokens import ControlTokens, longest_of
from quire.text.vocabulary.long_texts import EncodePart

# Characters for private use, which stand for control tokens.
STAND_INS: Final = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
# Characters that are in no control token: the first is not alphanumeric, the second is.
NEUTRAL: Final = ("\ufffd", "\u01c5")
# A character that no vocabulary has.
UNKNOWN: Final = "\U0010ffff"
# Characters that one call, which holds the interpreter's lock, looks at.
PART_CHARS: Final = 1 << 16
WITHOUT: Final = "text that the tokenizer can express without control tokens"
# Maximum number of passes over a part: each replaces characters of clients, which can reveal further control tokens.
MAX_TRIES: Final = 4


class _Span(NamedTuple):
    """A control token in a part of a text.

    Args:
        start, end: range of its characters.
        token_id: id of the token.
    """

    start: int
    end: int
    token_id: int


class SanitizedTexts:
    """Tokenizes the rendered conversations of one tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self.library = library
        self.encode = encode
        self.added: dict[int, AddedToken] = library.get_added_tokens_decoder()
        # If tokens are matched in normalized text, clients may write them in other characters, which have no marks.
        self.is_literal = library.normalizer is None or not any(token.normalized for token in self.added.values())
        self.unknown = _unknown_ids(library)
        self.characters = frozenset("".join(token.content for token in self.added.values()))
        self.others = lru_cache(maxsize=8)(self._others)

    def part_encoder(self, prompt: ChatPrompt) -> EncodePart | None:
        """Return the function that tokenizes parts of a prompt; None if ordinary tokenization gives the same tokens."""
        if prompt.control is None or (prompt.marked is None and self.is_literal):
            return None
        return _PromptEncoder(self, prompt.text, prompt.marked or prompt.text, prompt.control).encode

    def _others(self, control: ControlTokens) -> dict[int, AddedToken]:
        """Return the added tokens that are not control tokens, by id."""
        return {token_id: token for token_id, token in self.added.items() if not control.has(token.content)}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids of the added tokens by their text."""
        return {token.content: token_id for token_id, token in self.added.items()}

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Matches the added tokens as the library finds them; None if a match depends on more than a token's text."""
        if not self.is_literal or any(token.single_word for token in self.added.values()):
            return None
        return re.compile(longest_of([content for content in self.ids if content]))

    @cached_property
    def finder(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A faster tokenizer that only finds the added tokens; and a map from its ids to the model's ids."""
        library = tokenizers.Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
        if self.library.normalizer is not None:
            library.normalizer = self.library.normalizer
        library.add_tokens([*self.added.values()])
        ids = {library.token_to_id(content): token_id for content, token_id in self.ids.items()}
        return library, {finder_id: token_id for finder_id, token_id in ids.items() if finder_id is not None}


class _PromptEncoder:
    """Tokenizes the parts of one prompt."""

    def __init__(self, texts: SanitizedTexts, text: str, marked: str, control: ControlTokens) -> None:
        self._texts, self._text, self._marked, self._control = texts, text, marked, control

    def encode(self, start: int, end: int, lead: str) -> list[int]:
        """Return the tokens of `lead` and the text in a range."""
        part, marks = self._text[start:end], self._marked[start:end]
        forbidden = list(self._control.forbidden(part, marks))
        if not forbidden and self._texts.is_literal:
            return self._texts.encode(lead + part)
        return self._without_control.encode(lead, part, self._written(lead, part, marks, forbidden))

    @cached_property
    def _without_control(self) -> _WithoutControl:
        used: set[str] = set()
        for start in range(0, len(self._text), PART_CHARS):
            used.update(self._text[start : start + PART_CHARS])
        return _WithoutControl(self._texts, self._control, used)

    def _written(self, lead: str, part: str, marks: str, forbidden: list[tuple[int, int]]) -> list[_Span]:
        """Return the control tokens in a part that the template wrote, as the tokenizer finds them."""
        chars = [*part]
        spans: list[_Span] = []
        for _ in range(MAX_TRIES):
            for start, end in forbidden:
                # A text in other characters than a token's may have no marks.
                has_marks = marks[start:end] != part[start:end]
                for pos in range(start, end):
                    if marks[pos] != part[pos] or not has_marks:
                        chars[pos] = NEUTRAL[part[pos].isalnum()]
            spans, forbidden = [], []
            for span in self._spans("".join(chars), lead, part):
                start, end, token_id = span
                content = self._texts.added[token_id].content
                if content != part[start:end] or self._control.forbids(content, content, marks[start:end]):
                    forbidden.append((start, end))
                else:
                    spans.append(span)
            if not forbidden:
                break
        return spans

    def _spans(self, chars: str, lead: str, part: str) -> Iterator[_Span]:
        if self._texts.pattern is not None:
            for match in self._texts.pattern.finditer(chars):
                if self._control.has(match[0]):
                    yield _Span(*match.span(), self._texts.ids[match[0]])
            return
        library, token_ids = self._texts.finder
        (encoding,) = guarded(library.encode_batch, [lead + chars], add_special_tokens=False)
        for finder_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token_id = token_ids.get(finder_id)
            if token_id is not None and self._control.has(content := self._texts.added[token_id].content):
                start, end = start - len(lead), end - len(lead)
                # The range of a token includes the white space that it absorbs.
                pos = part.find(content, start, end)
                yield _Span(start, end, token_id) if pos < 0 else _Span(pos, pos + len(content), token_id)


class _WithoutControl:
    """A tokenizer without control tokens, with stand-in characters for the control tokens of the template."""

    def __init__(self, texts: SanitizedTexts, control: ControlTokens, used: set[str]) -> None:
        self._texts, self._control = texts, control
        self._library = _copy(texts.library)
        others = texts.others(control)
        self._library.add_tokens([*others.values()])
        # Ids of the model by the ids of this tokenizer.
        self._ids = {self._library.token_to_id(token.content): token_id for token_id, token in others.items()}
        taken = used | texts.characters
        self._free = (char for char in map(chr, chain(*STAND_INS)) if char not in taken)
        self._stand_ins: dict[int, str] = {}

    def encode(self, lead: str, part: str, spans: Sequence[_Span]) -> list[int]:
        """Return the tokens of `lead` and a part of the text."""
        pieces, end = [lead], 0
        for span in spans:
            pieces += (part[end : span.start], self._stand_in(span.token_id))
            end = span.end
        text = "".join(pieces) + part[end:]
        (encoding,) = guarded(self._library.encode_batch_fast, [text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        unique_ids = set(ids)
        if sum(
            ids.count(library_id) for library_id in unique_ids if self._ids.get(library_id) in self._stand_ins
        ) != len(spans):
            raise InvalidParameter("messages", part, WITHOUT)
        made = {
            library_id: self._spelled(library_id)
            for library_id in unique_ids
            if library_id not in self._ids and self._is_control(library_id)
        }
        if not made:
            return [self._ids.get(library_id, library_id) for library_id in ids]
        return [
            token_id
            for library_id in ids
            for token_id in made.get(library_id) or (self._ids.get(library_id, library_id),)
        ]

    def _stand_in(self, token_id: int) -> str:
        """Return the stand-in character of a token; the first call chooses and registers it."""
        if token_id not in self._stand_ins:
            char, token, normalizer = next(self._free, None), self._texts.added[token_id], self._library.normalizer
            if char is None:
                raise InvalidParameter("messages", token.content, "beside fewer characters for private use")
            # If the normalizer drops the character, it is matched before normalization.
            is_normal = token.normalized and (normalizer is None or char in normalizer.normalize_str(char))
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            self._library.add_tokens([AddedToken(char, normalized=is_normal, **flags)])
            self._ids[self._library.token_to_id(char)] = token_id
            self._stand_ins[token_id] = char
        return self._stand_ins[token_id]

    def _is_control(self, token_id: int) -> bool:
        """Return whether a token, which the model made from ordinary characters, is a control token."""
        token = self._texts.added.get(token_id)
        return token is not None and token_id not in self._texts.unknown and self._control.has(token.content)

    def _spelled(self, token_id: int) -> list[int]:
        """Return ordinary tokens that spell the text of a control token."""
        token, model = str(self._texts.library.id_to_token(token_id)), self._texts.library.model
        for pos in range(1, len(token)):
            token_ids = [piece.id for part in (token[:pos], token[pos:]) for piece in model.tokenize(part)]
            if not any(map(self._is_control, token_ids)):
                return token_ids
        raise InvalidParameter("messages", token, WITHOUT)


def _unknown_ids(library: tokenizers.Tokenizer) -> set[int]:
    """Return the tokens of an unknown character, which may be special tokens."""
    try:
        return {token.id for token in guarded(library.model.tokenize, UNKNOWN)}
    except Exception:  # a model without such a token fails
        return set()


def _copy(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer with the same model, normalizer and pre-tokenizer, without added tokens."""
    copy = tokenizers.Tokenizer(library.model)
    if library.normalizer is not None:
        copy.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        copy.pre_tokenizer = library.pre_tokenizer
    return copy
