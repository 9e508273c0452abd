"""Tokenizers from the metadata of GGUF files.

A file names its tokenizer model and, for byte-level BPE, its pre-tokenizer. An unknown name
is refused, since a wrong guess would change only some texts and go unnoticed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from operator import mul
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, normalizers, processors
from tokenizers.models import BPE

from quire.errors import ConfigError, UnsupportedModel, shown
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.ends import END_TEXTS, FILL_TEXTS, ends_by_text
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, UNNAMED, family_of, near_names
from quire.text.tokenizers.gguf_vocabulary import BYTE, CONTROL, PREFIX, UNKNOWN, USER_DEFINED, GGUFVocabulary
from quire.text.tokenizers.tokenizer_files import MAX_TEMPLATE_BYTES, TokenizerFiles
from quire.text.tokenizers.tokenizer_json import JsonSource
from quire.text.vocabulary.components import guarded

logger = logging.getLogger(__name__)

CHAT_TEMPLATE: Final = "tokenizer.chat_template"
# Names of special tokens in files -> names of variables of chat templates.
VARIABLES: Final = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
# Names of the tokens that end a sequence: the ends of a text, turn and message; and for models that fill in the middle,
# padding, and the beginning of another repository or file.
ENDS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# The special tokens of a sentencepiece tokenizer whose file does not name them.
SENTENCEPIECE_TOKENS: Final = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}
# Maximum sum of the squared lengths of tokens whose merges are derived: a vocabulary of 262,144 tokens of 16 characters
# has 67 million.
MAX_SQUARED_CHARS: Final = 1 << 30


def read_gguf_tokenizer(path: Path, fields: Mapping[str, Any], pre: str | None = None) -> TokenizerFiles:
    """Build the tokenizer of a GGUF file's metadata.

    Args:
        path: path of the file, for messages.
        fields: metadata by key.
        pre: name of the pre-tokenizer, in place of the one that the file names.

    Raises:
        CheckpointError: a field is missing or wrong; the message names its key.
        UnsupportedModel: the kind of tokenizer, or its pre-tokenizer, is not supported.
        ConfigError: `pre` is unknown, or this kind of tokenizer has no pre-tokenizer.
    """
    vocabulary = GGUFVocabulary(path, fields)
    kind = fields.get(f"{PREFIX}model")
    adds_bos = True
    defaults = SENTENCEPIECE_TOKENS if kind == "llama" else {}
    special = {name: vocabulary.token(name, defaults.get(name)) for name in VARIABLES}
    if kind == "gpt2":
        name = _name_of_pre_tokenizer(path, vocabulary, fields, pre)
        adds_bos = PRE_TOKENIZERS[name].adds_bos
        library = _byte_level(vocabulary, name)
    elif kind in ("llama", "gemma4"):
        if pre is not None:
            raise ConfigError(
                f"tokenizer_pre is {shown(pre)}, but {path} has a tokenizer of the model {kind}, which has no "
                "pre-tokenizer: leave it out",
                field="tokenizer_pre",
            )
        library = _sentencepiece(vocabulary, special["unknown"], adds_space=kind == "llama")
    else:
        raise UnsupportedModel(
            f"{path}: {PREFIX}model is {shown(kind)}, which is not read; read are gpt2, llama and gemma4",
            field=f"{PREFIX}model",
        )
    vocabulary.add_special_tokens(library, strips=kind == "llama" and fields.get("general.architecture") == "phi3")
    bos, eos = special["bos"], special["eos"]
    _frame_texts(library, vocabulary, bos, eos, adds_bos=adds_bos, needs_bos=kind == "gemma4")
    template = _template(vocabulary, fields, {VARIABLES[name]: token for name, token in special.items() if token})
    source = JsonSource.of(path, "of_gguf", str(path.absolute()), pre)
    return TokenizerFiles(path, library, bos, eos, template, vocabulary.doubles, source)


def end_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a sequence: first the tokens that the metadata names, then tokens with known texts."""
    return tuple(dict.fromkeys((*named_ends(fields), *sorted(end_texts(fields)))))


def named_ends(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids that the metadata of a file names as end tokens."""
    ids = (fields.get(f"{PREFIX}{name}_token_id") for name in ENDS)
    tokens = tokens_of(fields)
    return (
        token_id
        for token_id in ids
        if type(token_id) is int and token_id >= 0 and (token_id < len(tokens) or not tokens)
    )


def end_texts(fields: Mapping[str, Any]) -> dict[int, str]:
    """Return the texts of tokens with the text of a known end, by id."""
    tokens, types = tokens_of(fields), fields.get(f"{PREFIX}token_type")
    if not isinstance(types, list):  # a file without types has no other sign of control tokens than their texts
        types = [CONTROL] * len(tokens)
    known_texts = END_TEXTS | FILL_TEXTS
    texts: dict[int, dict[int, str]] = {CONTROL: {}, USER_DEFINED: {}}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if token in known_texts and kind in texts:
            texts[kind][token_id] = token
    return ends_by_text(texts[CONTROL], texts[USER_DEFINED], known_texts)


def tokens_of(fields: Mapping[str, Any]) -> list[Any]:
    """Return the tokens of a file, unchecked; empty if it has no list of tokens."""
    tokens = fields.get(f"{PREFIX}tokens")
    return tokens if isinstance(tokens, list) else []


def _template(
    vocabulary: GGUFVocabulary, fields: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Return the chat template of a file, or None."""
    source = fields.get(CHAT_TEMPLATE)
    if source is None:
        return None
    if not isinstance(source, str):
        vocabulary.warn(f"{CHAT_TEMPLATE} is {shown(source)}, which is no string: the file has no chat template")
        return None
    if len(source) > MAX_TEMPLATE_BYTES:
        raise vocabulary.wrong(CHAT_TEMPLATE, source, f"a string of at most {MAX_TEMPLATE_BYTES} characters")
    tools = fields.get(f"{CHAT_TEMPLATE}.tool_use")
    others = dict(special_tokens)
    return ChatTemplate(
        source,
        tool_source=tools if isinstance(tools, str) else None,
        bos_token=others.pop("bos_token", ""),
        eos_token=others.pop("eos_token", ""),
        special_tokens=others,
    )


def _name_of_pre_tokenizer(
    path: Path, vocabulary: GGUFVocabulary, fields: Mapping[str, Any], wanted: str | None
) -> str:
    """Return the name of the pre-tokenizer: `wanted`, else the file's, else the name of its vocabulary's family."""
    key = f"{PREFIX}pre"
    stated = fields.get(key, UNNAMED)
    if not isinstance(stated, str):
        raise vocabulary.wrong(key, stated, "a string")
    name = stated if wanted is None else wanted
    if name in PRE_TOKENIZERS:
        return name
    if name != UNNAMED:
        near = [*near_names(name)]
        hint = f"did you mean {' or '.join(near)}? Known are" if near else "known are"
        problem = f"{shown(name)}, an unknown pre-tokenizer; {hint} {', '.join(PRE_TOKENIZERS)}"
        if wanted is not None:
            raise ConfigError(f"tokenizer_pre is {problem}", field="tokenizer_pre")
        raise UnsupportedModel(f"{path}: {key} is {problem}; the option tokenizer_pre chooses one of these", field=key)
    family = family_of(len(vocabulary.tokens), {*vocabulary.of_type(CONTROL), *vocabulary.of_type(USER_DEFINED)})
    if family is not None:
        logger.info("%s: %s is missing; the vocabulary is that of %s", path, key, family)
        return family
    logger.warning(
        "%s: %s is missing, and the vocabulary is of no known family: texts are divided as GPT-2 does, which may be "
        "wrong for some. The option tokenizer_pre names another way; known are %s",
        *(path, key, ", ".join(PRE_TOKENIZERS)),
    )
    return "gpt-2"


def _byte_level(vocabulary: GGUFVocabulary, name: str) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer, which merges bytes within words."""
    row = PRE_TOKENIZERS[name]
    merges = _merges(vocabulary)
    library = tokenizers.Tokenizer(
        guarded(BPE, vocabulary.ids, merges, fuse_unk=False, byte_fallback=False, ignore_merges=row.takes_words)
    )
    if row.is_normalized:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = row.build()
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(vocabulary: GGUFVocabulary, unknown: str | None, *, adds_space: bool) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE tokenizer, which merges the characters of a text, with ▁ in place of spaces."""
    by_score = adds_space and not vocabulary.has("merges")
    library = tokenizers.Tokenizer(
        guarded(
            BPE,
            vocabulary.ids,
            _merges_by_score(vocabulary) if by_score else _merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", adds_space):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(undo)
    return library


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Return the merges of a file."""
    ids, merges = vocabulary.ids, []
    for merge in vocabulary.texts("merges"):
        # No token of these alphabets contains a space, so the first space separates the two tokens.
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.wrong(f"{PREFIX}merges", merge, "two tokens with a space between them, whose join is one")
        merges.append((left, right))
    return merges


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose join is a token, the best score first."""
    tokens, ids, types = vocabulary.tokens, vocabulary.ids, vocabulary.types
    lengths = [*map(len, tokens)]
    total = sum(map(mul, lengths, lengths))
    if total > MAX_SQUARED_CHARS:
        allowed = f"tokens whose squared lengths sum to at most {MAX_SQUARED_CHARS:,} where merges are missing"
        raise vocabulary.wrong(f"{PREFIX}tokens", total, allowed)
    scores = vocabulary.numbers("scores")
    joined = [token_id for token_id in ids.values() if types[token_id] not in (CONTROL, UNKNOWN, BYTE)]
    joined.sort(key=scores.__getitem__, reverse=True)
    pairs: list[tuple[str, str]] = []
    append, begin, before = pairs.append, 0, None
    tied: dict[int, int] = {}
    for token_id in joined:
        token, score = tokens[token_id], scores[token_id]
        is_tied = score == before
        if not is_tied:
            begin, before = len(pairs), score
        for middle in range(1, lengths[token_id]):
            # The end of a token is a token less often than its beginning, so it is looked up first. Tuples of the new
            # strings take less time than tuples of the vocabulary's strings, which are scattered in memory.
            right = token[middle:]
            if right in ids:
                left = token[:middle]
                if left in ids:
                    append((left, right))
        if is_tied:
            tied[begin] = len(pairs)
    # Merges of equal scores are in the order of the ids of their parts. Merges of one token may be in any order: the
    # merges before the last one are the same in every text with this token, so only one pair is ever merged to it.
    for begin, end in tied.items():
        pairs[begin:end] = sorted(pairs[begin:end], key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return pairs


def _frame_texts(
    library: tokenizers.Tokenizer,
    vocabulary: GGUFVocabulary,
    bos: str | None,
    eos: str | None,
    *,
    adds_bos: bool,
    needs_bos: bool,
) -> None:
    """Add BOS and EOS around texts, if the file says so."""
    wanted = {"bos": vocabulary.flag("add_bos_token", adds_bos), "eos": vocabulary.flag("add_eos_token", False)}
    for name, token in (("bos", bos), ("eos", eos)):
        if wanted[name] and token is None and vocabulary.has(f"add_{name}_token"):
            key = f"{PREFIX}{name}_token_id"
            raise vocabulary.wrong(key, None, f"a token id where {PREFIX}add_{name}_token is true")
    if needs_bos and not wanted["bos"]:
        vocabulary.warn(f"{PREFIX}add_bos_token is false, but the model needs the token before each text: it is added")
        wanted["bos"] = True
    first = [bos] if bos is not None and wanted["bos"] else []
    last = [eos] if eos is not None and wanted["eos"] else []
    if not first and not last:
        return
    library.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *first, "$B", *last],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*first, *last}],
    )
