"""A model's tokenizer: text to token ids, ids to text, and the bytes of each token."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import tokenizers

from quire.errors import CheckpointError, InvalidParameter
from quire.platform.bounded.process import RemoteCall
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.sanitized_texts import SanitizedTexts
from quire.text.tokenizers.tokenizer_files import TokenizerFiles, read_tokenizer_files
from quire.text.tokenizers.tokenizer_json import JsonSource
from quire.text.vocabulary.bounds import check_settings
from quire.text.vocabulary.components import byte_alphabet, decoders, guarded
from quire.text.vocabulary.control_tokens import AddedTokens
from quire.text.vocabulary.long_texts import CannotCut, LongTexts, TooManyTokens, prompt_errors
from quire.text.vocabulary.token_pieces import Pieces, TokenPiece, fallback_byte

# With these decoders a token adds the same bytes after any other token, which incremental detokenization needs.
KNOWN_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Replace", "Fuse", "Strip"})
MAX_TOKEN_ID = 2**32 - 1


class Tokenizer:
    """Converts text to token ids and back, for one model.

    Args:
        library: tokenizer of the `tokenizers` library; its truncation and padding are switched off.
        bos_token: token that begins a text, or None.
        eos_token: token that ends a text, or None.
        chat_template: the model's chat template, or None.
        doubles: ids of duplicate tokens, which are decoded but never encoded, mapped to the id of the same text; the
            library does not know the duplicates.
        json_source: file from which another process can read the tokenizer, or None.

    Attributes:
        pieces: the token of each id as a part of a text.

    Raises:
        CheckpointError: a decoder makes a token's text depend on its neighbours, or a setting makes a short text take
            much time or memory.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: ChatTemplate | None = None,
        doubles: Mapping[int, int] = MappingProxyType({}),
        json_source: JsonSource | None = None,
    ) -> None:
        # Many published files contain the truncation of their training run.
        library.no_truncation()
        library.no_padding()
        kinds = {kind["type"] for kind in decoders(library)}
        for kind in decoders(library):
            # A right strip changes the last token, which is only known at the end.
            if kind["type"] not in KNOWN_DECODERS or kind.get("stop", 0):
                raise CheckpointError(
                    f"the tokenizer's decoder {kind['type']} cannot be decoded token by token; "
                    f"known decoders are {', '.join(sorted(KNOWN_DECODERS))}"
                )
        check_settings(library)
        self._library = library
        self._doubles = doubles
        self._json_source = json_source
        self._long_texts = LongTexts(library, self._ids_of)
        self._sanitized_texts = SanitizedTexts(library, self._ids_of)
        self.added_tokens = AddedTokens(library)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self.pieces: Mapping[int, TokenPiece] = Pieces(self._derive_piece)
        self.has_byte_fallback = "ByteFallback" in kinds
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True) + len(doubles)
        added = library.get_added_tokens_decoder()
        # Tokens that are matched in a text before the model divides it.
        self.added_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special | {token_id for token_id, first in doubles.items() if first in special})
        self.bos_token_id = None if bos_token is None else library.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else library.token_to_id(eos_token)
        self.chat_template = chat_template
        # Its processes render the callers' templates where the model has none.
        self._base_template = chat_template or ChatTemplate("", bos_token=bos_token or "", eos_token=eos_token or "")

    def make_chat_template(self, source: object) -> ChatTemplate:
        """Return a chat template with the model's special tokens, from a Jinja source of the caller.

        Raises:
            InvalidParameter: the source is not a string.
            RequestError: it cannot be compiled.
        """
        if not isinstance(source, str):
            raise InvalidParameter("chat_template", source, "the text of a Jinja template, or None")
        return self._base_template.with_source(source)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer from a checkpoint's folder.

        Args:
            path: folder of `tokenizer.json`; `tokenizer_config.json` and `chat_template.jinja` are optional.

        Raises:
            CheckpointError: naming a missing or damaged file.
        """
        return cls.from_files(read_tokenizer_files(Path(path)))

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> Tokenizer:
        """Build a tokenizer from the parts of a checkpoint.

        Raises:
            CheckpointError: the tokenizer is broken or not supported.
        """
        try:
            return guarded(
                cls,
                files.library,
                bos_token=files.bos_token,
                eos_token=files.eos_token,
                chat_template=files.chat_template,
                doubles=files.doubles,
                json_source=files.json_source,
            )
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{files.path} is not a tokenizer: {error}") from error

    def differs_at(self, other: Tokenizer) -> int | None:
        """Return the lowest token id that differs between two tokenizers, or exists in one only; None if none does."""
        mine, theirs = (tokenizer._library.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        return min((token_id for _, token_id in mine.items() ^ theirs.items()), default=None)

    def encode(
        self, text: str | ChatPrompt, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Convert text to token ids in bounded memory; other threads run meanwhile.

        Args:
            text: text without lone surrogates; special tokens in it become their ids, except ones that clients wrote
                into a rendered conversation.
            add_special_tokens: True to add the model's special tokens around the text (a rendered chat has them
                already).
            max_tokens: limit at which tokenization ends early; None for no limit.

        Raises:
            InvalidParameter: the text is not a string or not Unicode, or a part is too long to be tokenized at once.
            TooManyTokens: there are more than `max_tokens`.
        """
        encode_part = None
        if isinstance(text, ChatPrompt):
            encode_part, text = self._sanitized_texts.part_encoder(text), text.text
        if not isinstance(text, str):
            raise InvalidParameter("prompt", text, "a string")
        with prompt_errors(text):
            if len(text) <= self._long_texts.piece_chars and encode_part is None:
                token_ids = self._ids_of(text, add_special_tokens=add_special_tokens)
                if max_tokens is not None and len(token_ids) > max_tokens:
                    raise TooManyTokens(len(token_ids), is_exact=True)
                return token_ids
            text.encode()
            before, after = self._frame if add_special_tokens else ([], [])
            return self._long_texts.encode(text, max_tokens, before, after, encode_part)

    def encode_first(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Convert the beginning of a text to at most `num_tokens` token ids, including all special tokens around it.

        Raises:
            InvalidParameter: see `encode`; or the special tokens leave no room for the text.
        """
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        if len(token_ids) <= num_tokens:
            return token_ids
        before, after = self._frame if add_special_tokens else ([], [])
        num_special = len(before) + len(after)
        if num_tokens <= num_special:
            allowed = f"more than the {num_special} special tokens of a text"
            raise InvalidParameter("truncate_prompt_tokens", num_tokens, allowed)
        end = len(token_ids) - len(after)
        return token_ids[: min(end, num_tokens - len(after))] + token_ids[end:]

    def encode_pair(self, first: str, second: str, *, num_tokens: int | None = None) -> tuple[list[int], int | None]:
        """Convert a pair of texts to token ids, with the model's special tokens around and between them.

        Args:
            first, second: texts, each short enough to be tokenized at once.
            num_tokens: limit of the result: the longer text is cut first, then both equally; None for no limit.

        Returns:
            The token ids, and the position of the first one of token type 1; None if all types are 0.

        Raises:
            InvalidParameter: see `encode`; or the special tokens leave no room for the texts.
        """
        for text in (first, second):
            if len(text) > self._long_texts.piece_chars:
                allowed = f"texts of at most {self._long_texts.piece_chars} characters in a pair"
                raise InvalidParameter("prompt", f"{len(text)} characters", allowed)
        with prompt_errors([first, second]):
            library = self._library
            one, two = guarded(library.encode_batch, [first, second], add_special_tokens=False)
            num_special: int = library.num_special_tokens_to_add(True)
            if num_tokens is not None and num_tokens <= num_special:
                allowed = f"more than the {num_special} special tokens of a pair"
                raise InvalidParameter("truncate_prompt_tokens", num_tokens, allowed)
            if num_tokens is not None:
                lengths = _longest_first(len(one), len(two), num_tokens - num_special)
                for part, length in zip((one, two), lengths, strict=True):
                    part.truncate(length)
            encoding = library.post_process(one, two)
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def prepare_long_texts(self) -> None:
        """Prepare the tokenization of long texts ahead of the first one; blocks other threads."""
        with suppress(Exception):  # a failure of the library is reported with the first long text
            guarded(self._long_texts.prepare)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Convert token ids to text, while other threads run; ids without a token add nothing.

        Raises:
            InvalidParameter: an id is negative or has more than 32 bits, or the tokenizer fails.
        """
        try:
            canonical_ids = [self._doubles.get(token_id, token_id) for token_id in ids] if self._doubles else ids
            (text,) = guarded(self._library.decode_batch, [canonical_ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidParameter("token_ids", ids, f"integers from 0 to {MAX_TOKEN_ID}") from error
        except Exception as error:
            raise InvalidParameter("token_ids", ids, f"token ids that the tokenizer can decode ({error})") from error
        return str(text)

    def close(self) -> None:
        """End the processes that render chats."""
        self._base_template.close()

    def to_json(self) -> str:
        """Return the tokenizer as the text of a `tokenizer.json`."""
        return str(self._library.to_str())

    def json_call(self) -> RemoteCall:
        """Return a call with the result of `to_json`, for another process; it reads the model's files if unchanged."""
        source = self._json_source
        if source is not None and source.is_unchanged:
            return source.call
        return RemoteCall("quire.text.tokenizers.tokenizer_json:same", (self.to_json(),))

    def token_text(self, token_id: int) -> str:
        """Return a token's text, with replacement characters for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds after the beginning of a text; none for an id without a token."""
        return self.pieces[token_id].data

    def head_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token at the beginning of a text: many decoders strip a space there."""
        piece = self.token_bytes(token_id)
        if self._alphabet is not None or not _is_text(piece):
            return piece
        try:
            return self.decode([token_id], skip_special_tokens=False).encode()
        except InvalidParameter:
            return piece

    def is_visible(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether `decode` includes a token in the text."""
        piece = self.pieces[token_id]
        return piece.is_token and not (skip_special_tokens and piece.is_special)

    def _ids_of(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text that is not long."""
        # Unlike the library's other methods, this one releases the interpreter's lock.
        (encoding,) = guarded(self._library.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that are added before and after a text."""
        # A model may know few letters, or whole words only.
        token_ids = range(0, self.vocab_size, 1 + self.vocab_size // 150)
        for text in chain(string.ascii_letters, filter(None, map(self._library.model.id_to_token, token_ids))):
            try:
                encoding = guarded(self._library.encode, text)
            except Exception:  # the library raises nothing narrower
                continue
            is_special: list[int] = encoding.special_tokens_mask
            if 0 in is_special:
                first, last = is_special.index(0), len(is_special) - is_special[::-1].index(0)
                return encoding.ids[:first], encoding.ids[last:]
        raise CannotCut(0)

    def _derive_piece(self, token_id: int) -> TokenPiece:
        token_id = self._doubles.get(token_id, token_id)
        token: str | None = self._library.id_to_token(token_id)
        if token is None:
            return TokenPiece(b"", is_token=False, is_special=False, is_fallback_byte=False)
        byte = fallback_byte(token) if self.has_byte_fallback else None
        data = self._derive_bytes(token_id, token) if byte is None or self._alphabet is not None else bytes([byte])
        return TokenPiece(data, True, token_id in self.special_ids, byte is not None)

    def _derive_bytes(self, token_id: int, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, whose text is literal
                return bytes(token.encode())
        # A token adds the same bytes after itself as after any other token.
        try:
            once = self.decode([token_id], skip_special_tokens=False)
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
        except InvalidParameter:  # the decoder fails on this token; all others must stay usable
            return "\ufffd".encode()
        return twice[len(once) :].encode()


def _longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return lengths with a sum of at most `limit`: the longer text is cut to the shorter, then both equally."""
    if first + second <= limit:
        return first, second
    shorter = min(first, second, limit // 2)
    return (shorter, limit - shorter) if first <= second else (limit - shorter, shorter)


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
