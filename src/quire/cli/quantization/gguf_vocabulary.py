"""The GGUF representation of a tokenizer: the inverse of `quire.text.tokenizers.gguf_tokenizer`.

The tokenizer that would be read from the file is compared with the model's tokenizer on sample texts; a tokenizer with
differences is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from quire.cli.quantization.calibration_text import bundled_texts
from quire.cli.quantization.gguf_header import FieldValue
from quire.errors import QuireError, UnsupportedModel, shown
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.text.tokenizers.gguf_tokenizer import CHAT_TEMPLATE, read_gguf_tokenizer
from quire.text.tokenizers.gguf_tokenizer import end_token_ids as ends_of_file
from quire.text.tokenizers.gguf_vocabulary import BYTE, CONTROL, NORMAL, PREFIX, UNKNOWN, UNUSED, USER_DEFINED
from quire.text.tokenizers.tokenizer import Tokenizer

# The fields of tokens that end a sequence: end of text, of turn, of message.
ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# Sample texts: contractions, numbers, spaces, several scripts and incomplete words.
TEXTS: Final = (
    "It's 12345.678, isn't it?  I'LL\tgo\n\n  now\r\n... {\"a\": [1, 2]}\n",
    "Straße, œuvre, naïve café; Привет, мир! こんにちは世界 مرحبا 안녕 🙂👍🏽 ﬁ ①½ e\u0301",
    "def f(x):\n    return x**2  # comment\n<|user|> <s> </s> [INST]",
)


def tokenizer_fields(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> dict[str, FieldValue]:
    """Return the fields of a tokenizer."""
    stored = json.loads(tokenizer.to_json())
    model, eos = stored["model"], tokenizer.eos_token_id
    ends = [*dict.fromkeys((*([] if eos is None else [eos]), *end_token_ids))]
    if model["type"] != "BPE" or tokenizer.vocab_size > vocab_size:
        raise _refusal(f"of type {shown(model['type'])} with {tokenizer.vocab_size} tokens")
    kind = "gpt2" if "ByteLevel" in {step["type"] for step in _steps(stored["pre_tokenizer"])} else "llama"
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    tokens, types = _tokens(stored, vocab_size)
    fields: dict[str, FieldValue] = {"model": kind, "tokens": tokens, "token_type": types}
    if kind == "gpt2":
        fields |= {"pre": _division(stored), "merges": merges}
    else:
        fields |= {"scores": _scores(tokens, merges), "add_space_prefix": _adds_space(stored)}
    fields |= dict(zip(ENDS, ends, strict=False))
    if tokenizer.bos_token_id is not None:
        fields["bos_token_id"] = tokenizer.bos_token_id
    if model.get("unk_token") in model["vocab"]:
        fields["unknown_token_id"] = model["vocab"][model["unk_token"]]
    ids = tokenizer.encode("a")
    fields["add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    fields["add_eos_token"] = bool(ids) and ids[-1] == tokenizer.eos_token_id
    named = {f"{PREFIX}{name}": value for name, value in fields.items()}
    template = tokenizer.chat_template
    if template is not None:
        named[CHAT_TEMPLATE] = template.source
        if template.for_tools is not template:
            named[f"{CHAT_TEMPLATE}.tool_use"] = template.for_tools.source
    lost = {*ends} - {*ends_of_file(named)}  # tokens with known texts need no field
    if lost:
        raise _refusal(f"with {len(ends)} end tokens, of which the file would lose {shown(sorted(lost))}")
    _check(tokenizer, named)
    return named


def _tokens(stored: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token; embedding rows without a token get a placeholder text."""
    model, added = stored["model"], {token["id"]: token for token in stored["added_tokens"]}
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    types = {token_id: CONTROL if token["special"] else USER_DEFINED for token_id, token in added.items()}
    for token_id, text in texts.items():
        if model["byte_fallback"] and len(text) == 6 and text.startswith("<0x"):
            types[token_id] = BYTE
        elif text == model.get("unk_token"):
            types[token_id] = UNKNOWN
    every = range(vocab_size)
    return (
        [texts.get(token_id, f"[PAD{token_id}]") for token_id in every],
        [types.get(token_id, NORMAL if token_id in texts else UNUSED) for token_id in every],
    )


def _division(stored: Mapping[str, Any]) -> str:
    """Return GGUF's name of the pre-tokenizer."""
    steps = [*_steps(stored["pre_tokenizer"])]
    patterns = tuple(step["pattern"].get("Regex") for step in steps if step["type"] == "Split")
    division = PreTokenizer(
        patterns,
        has_digits="Digits" in {step["type"] for step in steps},
        is_normalized="NFC" in {step["type"] for step in _steps(stored["normalizer"])},
        takes_words=bool(stored["model"].get("ignore_merges")),
    )
    for name, row in PRE_TOKENIZERS.items():
        if row._replace(adds_bos=False) == division:  # it has a separate field
            return name
    raise _refusal(f"that divides texts by {shown(patterns)}, which has no name in GGUF files")


def _scores(tokens: Sequence[str], merges: Iterable[str]) -> list[float]:
    """Return scores that merge pairs of tokens in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(ranks) + token_id)) for token_id, token in enumerate(tokens)]


def _adds_space(stored: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer adds a space before the first word of a text."""
    kinds = {step["type"]: step for step in (*_steps(stored["normalizer"]), *_steps(stored["pre_tokenizer"]))}
    return "Prepend" in kinds or kinds.get("Metaspace", {}).get("prepend_scheme", "never") != "never"


def _steps(component: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
    for inner in component.get("pretokenizers", component.get("normalizers", ())):
        yield from _steps(inner)


def _check(tokenizer: Tokenizer, fields: Mapping[str, FieldValue]) -> None:
    """Compare the tokenizer that is built from the fields with the model's tokenizer."""
    try:
        other = Tokenizer.from_files(read_gguf_tokenizer(Path("the file"), fields))
    except QuireError as error:
        raise _refusal(f"that would not be read: {error}") from error
    for text in (*TEXTS, *bundled_texts()):
        if other.encode(text) != tokenizer.encode(text):
            raise _refusal(f"that would be read as another: the tokens of {shown(text)} differ")


def _refusal(reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"the model has a tokenizer {reason}; it is not written to GGUF files", field="to")
