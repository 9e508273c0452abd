"""Tokenization of rendered conversations in which the texts of clients become no control tokens.

A tokenizer divides a text at its added tokens before anything else. To keep it from doing so at some of them, and to
leave all other tokens as they would be, a second tokenizer without the control tokens has the same model, normalizer
and pre-tokenizer, and for each control token a character that the text does not have, which stands for the template's
own ones. Both tokenizers share their parts, so the second one is made for each text that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import tokenizers
from tokenizers import AddedToken

from quire.errors import InvalidParameter
from quire.text.chat_prompt import ChatPrompt
from quire.text.components import guarded
from quire.text.control_tokens import ControlTokens
from quire.text.long_texts import EncodePart

# Characters for private use, which stand for control tokens.
STAND_INS: Final = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
# Characters that are in no control token: not one of words, and one of words.
NEUTRAL: Final = ("\ufffd", "\u01c5")
# A character that no vocabulary has.
UNKNOWN: Final = "\U0010ffff"
# Characters that are looked at in one call, which holds the interpreter's lock.
PART_CHARS: Final = 1 << 16
WITHOUT: Final = "text that the tokenizer can express without control tokens"
# Tokenizations of a text in which clients' characters reveal further control tokens of the template.
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
    """Tokenizes the rendered conversations of one tokenizer.

    Args:
        library: the tokenizer.
        encode: function that tokenizes a text at once, without special tokens around it.
    """

    def __init__(self, library: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self.library = library
        self.encode = encode
        self.added: dict[int, AddedToken] = library.get_added_tokens_decoder()
        # Where tokens are matched in normalized text, clients may write them in other characters.
        self.is_literal = library.normalizer is None or not any(token.normalized for token in self.added.values())
        self.unknown = _unknown_ids(library)

    def part_encoder(self, prompt: ChatPrompt) -> EncodePart | None:
        """Return the function that tokenizes parts of a prompt; None where the prompt has no marks."""
        if prompt.control is None or prompt.marked is None:
            return None
        return _PromptEncoder(self, prompt.text, prompt.marked, prompt.control).encode


class _PromptEncoder:
    """Tokenizes the parts of one prompt.

    Args:
        texts: the tokenizer.
        text: the prompt.
        marked: the prompt with marks.
        control: control tokens that texts of clients may not become.
    """

    def __init__(self, texts: SanitizedTexts, text: str, marked: str, control: ControlTokens) -> None:
        self._texts, self._text, self._marked, self._control = texts, text, marked, control

    def encode(self, start: int, end: int, lead: str) -> list[int]:
        """Return the tokens of the text in a range, after a lead.

        Raises:
            InvalidParameter: the tokenizer has no tokens for the text but control tokens.
        """
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
        """Return the control tokens of a part that the template wrote, as the tokenizer finds them.

        Args:
            lead: text before the part.
            part: the part.
            marks: the part with marks.
            forbidden: ranges of texts of clients that are no control tokens.
        """
        chars = [*part]
        spans: list[_Span] = []
        for _ in range(MAX_TRIES):
            for pos in (pos for start, end in forbidden for pos in range(start, end) if marks[pos] != part[pos]):
                chars[pos] = NEUTRAL[part[pos].isalnum()]
            library = self._texts.library
            (encoding,) = guarded(library.encode_batch, [lead + "".join(chars)], add_special_tokens=False)
            spans, forbidden = [], []
            for span in self._spans(encoding, lead, part):
                start, end, token_id = span
                content = self._texts.added[token_id].content
                if self._control.forbids(content, part[start:end], marks[start:end]):
                    forbidden.append((start, end))
                else:
                    spans.append(span)
            if not forbidden:
                break
        return spans

    def _spans(self, encoding: tokenizers.Encoding, lead: str, part: str) -> Iterator[_Span]:
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._texts.added.get(token_id)
            if token is not None and self._control.has(token.content):
                start, end = start - len(lead), end - len(lead)
                # The range of a token has the white space that it absorbs.
                pos = part.find(token.content, start, end)
                if pos >= 0:
                    yield _Span(pos, pos + len(token.content), token_id)
                elif token_id not in self._texts.unknown:
                    yield _Span(start, end, token_id)


class _WithoutControl:
    """A tokenizer without its control tokens, with characters that stand for those of the template.

    Args:
        texts: the tokenizer with them.
        control: the control tokens.
        used: characters that stand for themselves.
    """

    def __init__(self, texts: SanitizedTexts, control: ControlTokens, used: set[str]) -> None:
        self._texts, self._control = texts, control
        self._library = _copy(texts.library)
        others = {token_id: token for token_id, token in texts.added.items() if not control.has(token.content)}
        self._library.add_tokens([*others.values()])
        # The id in this tokenizer, and in the model's.
        self._ids = {self._library.token_to_id(token.content): token_id for token_id, token in others.items()}
        taken = used.union(*(token.content for token in texts.added.values()))
        self._free = (char for char in map(chr, chain(*STAND_INS)) if char not in taken)
        self._stand_ins: dict[int, str] = {}

    def encode(self, lead: str, part: str, spans: Sequence[_Span]) -> list[int]:
        """Return the tokens of a part of the text, after a lead.

        Args:
            lead: text before the part.
            part: the part.
            spans: the control tokens in it.

        Raises:
            InvalidParameter: the tokenizer has no tokens for the text but other control tokens, or the text has too
                many characters for private use.
        """
        pieces, end = [lead], 0
        for span in spans:
            pieces += (part[end : span.start], self._stand_in(span.token_id))
            end = span.end
        text = "".join(pieces) + part[end:]
        (encoding,) = guarded(self._library.encode_batch_fast, [text], add_special_tokens=False)
        token_ids: list[int] = []
        num_control = 0
        for found in encoding.ids:
            token_id = self._ids.get(found)
            num_control += token_id in self._stand_ins
            if token_id is not None:
                token_ids.append(token_id)
            elif self._is_control(found):
                token_ids += self._spelled(found)
            else:
                token_ids.append(found)
        if num_control != len(spans):
            raise InvalidParameter("messages", part, WITHOUT)
        return token_ids

    def _stand_in(self, token_id: int) -> str:
        """Return the character that stands for a token, from now on."""
        if token_id not in self._stand_ins:
            char, token, normalizer = next(self._free, None), self._texts.added[token_id], self._library.normalizer
            if char is None:
                raise InvalidParameter("messages", token.content, "beside fewer characters for private use")
            # Where the normalizer leaves the character out, it is matched before.
            is_normal = token.normalized and (normalizer is None or char in normalizer.normalize_str(char))
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            self._library.add_tokens([AddedToken(char, normalized=is_normal, **flags)])
            self._ids[self._library.token_to_id(char)] = token_id
            self._stand_ins[token_id] = char
        return self._stand_ins[token_id]

    def _is_control(self, token_id: int) -> bool:
        """Return whether the model has made a control token of ordinary characters."""
        token = self._texts.added.get(token_id)
        return token is not None and token_id not in self._texts.unknown and self._control.has(token.content)

    def _spelled(self, token_id: int) -> list[int]:
        """Return other tokens of the text of a control token.

        Raises:
            InvalidParameter: there are none.
        """
        token, model = str(self._texts.library.id_to_token(token_id)), self._texts.library.model
        for pos in range(1, len(token)):
            token_ids = [each.id for part in (token[:pos], token[pos:]) for each in model.tokenize(part)]
            if not any(map(self._is_control, token_ids)):
                return token_ids
        raise InvalidParameter("messages", token, WITHOUT)


def _unknown_ids(library: tokenizers.Tokenizer) -> set[int]:
    """Return the tokens that the model makes of what it does not know, which may be special ones."""
    try:
        return {each.id for each in guarded(library.model.tokenize, UNKNOWN)}
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
