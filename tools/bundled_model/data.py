"""Tokenization of documents, and packing into rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from tools.bundled_model.conversation import MARKERS, ROLE_MARKERS
from tools.bundled_model.corpus import BOS, SPECIALS, Document, documents

LENGTHS = (256, 512, 1024)


def train_tokenizer(seed: int, count: int, vocab: int) -> Tokenizer:
    """Train a byte-level tokenizer on the corpus.

    Args:
        seed: seed of the documents.
        count: number of documents.
        vocab: number of tokens, with the special ones and all bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for made in islice(documents(seed), count) for text, _ in _without_specials(made))
    tokenizer.train_from_iterator(texts, trainer)
    bos = id_of(tokenizer, BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def with_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose last merges have made room for the markers of tools and thinking.

    The other tokens keep their ids, and the size of the vocabulary stays.

    Args:
        tokenizer: tokenizer without the markers.
    """
    state = json.loads(tokenizer.to_str())
    kept, merges = state["model"]["vocab"], state["model"]["merges"]
    size = len(kept) - len(MARKERS)
    state["model"]["vocab"] = {token: token_id for token, token_id in kept.items() if token_id < size}
    state["model"]["merges"] = merges[: -len(MARKERS)]
    marked = Tokenizer.from_str(json.dumps(state))
    # As with Qwen's tokenizers, marks of calls and of thinking are text; those of roles are not.
    marked.add_tokens([AddedToken(text, special=text in ROLE_MARKERS, normalized=False) for text in MARKERS])
    return marked


def _without_specials(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return a document without its special tokens, which the tokenizer does not split.

    Args:
        pieces: a document.
    """
    cleaned = []
    for text, learned in pieces:
        for special in SPECIALS:
            text = text.replace(special, "\n")
        cleaned += [(part, learned) for part in text.split("\n") if part]
    return cleaned


@dataclass
class TrainingRow:
    """A row of consecutive documents.

    Attributes:
        ids: token ids.
        learned: True where the model learns to write the token.
        owners: number of the document of each token.
    """

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, ids: list[int], learned: list[bool]) -> None:
        """Append a document.

        Args:
            ids: token ids of the document.
            learned: True where the model learns to write the token.
        """
        owner = self.owners[-1] + 1 if self.owners else 0
        self.ids += ids
        self.learned += learned
        self.owners += [owner] * len(ids)


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of one length, ready for a step of training.

    Attributes:
        inputs: token ids, ``[rows, length]``.
        targets: the next tokens, with -100 where nothing is to be learned.
        mask: True where a query may attend to a key, ``[rows, 1, length, length]``.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist.

    Args:
        tokenizer: the tokenizer.
        token: the text of the token.

    Raises:
        KeyError: If the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode(tokenizer: Tokenizer, stream: Iterator[Document], tokens: int) -> list[tuple[list[int], list[bool]]]:
    """Return encoded documents with a total number of tokens.

    Args:
        tokenizer: the tokenizer.
        stream: endless documents.
        tokens: number of tokens.

    Returns:
        Ids and learning flags for each document.
    """
    encoded: list[tuple[list[int], list[bool]]] = []
    while tokens > 0:
        made = list(islice(stream, 2000))
        texts = [text for pieces in made for text, _ in pieces]
        parts = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        for pieces in made:
            ids: list[int] = []
            learned: list[bool] = []
            for _, flag in pieces:
                part = next(parts).ids
                ids += part
                learned += [flag] * len(part)
            if len(ids) <= LENGTHS[-1] + 1:
                encoded.append((ids, learned))
                tokens -= len(ids)
    return encoded


def pack(encoded: list[tuple[list[int], list[bool]]], open_rows: int = 12) -> dict[int, list[TrainingRow]]:
    """Pack whole documents into rows, each where it leaves the least space.

    Args:
        encoded: ids and learning flags for each document.
        open_rows: number of rows of a length that are filled at the same time.

    Returns:
        For each length, the rows; a row holds at most one token more than its length.
    """
    done: dict[int, list[TrainingRow]] = {length: [] for length in LENGTHS}
    filling: dict[int, list[TrainingRow]] = {length: [] for length in LENGTHS}
    for ids, learned in encoded:
        length = next(size for size in LENGTHS if len(ids) <= size + 1)
        rows = filling[length]
        # A short document may also fill the end of a longer row.
        sizes = [size for size in LENGTHS if size >= length]
        fitting = [row for size in sizes for row in filling[size] if len(row.ids) + len(ids) <= size + 1]
        if fitting:
            max(fitting, key=lambda row: len(row.ids)).add(ids, learned)
            continue
        row = TrainingRow()
        row.add(ids, learned)
        rows.append(row)
        if len(rows) > open_rows:
            fullest = max(rows, key=lambda one: len(one.ids))
            rows.remove(fullest)
            done[length].append(fullest)
    for length in LENGTHS:
        done[length] += filling[length]
    return done


def to_batch(rows: list[TrainingRow], length: int, pad: int) -> TrainingBatch:
    """Return rows as a batch whose mask separates the documents of a row.

    Args:
        rows: rows to batch.
        length: length of the rows.
        pad: token id that fills the end of short rows.
    """
    size = length + 1
    ids = torch.tensor([row.ids + [pad] * (size - len(row.ids)) for row in rows])
    owners = torch.tensor([row.owners + [-1] * (size - len(row.ids)) for row in rows])
    learned = torch.tensor([row.learned + [False] * (size - len(row.ids)) for row in rows])
    targets = ids[:, 1:].masked_fill(~learned[:, 1:], -100)
    seen = owners[:, :-1]
    same = seen[:, :, None] == seen[:, None, :]
    mask = same & torch.ones(length, length, dtype=torch.bool).tril()
    return TrainingBatch(ids[:, :-1].contiguous(), targets.contiguous(), mask[:, None])


def schedule(
    packed: dict[int, list[TrainingRow]], tokens: int, rng: random.Random
) -> list[tuple[int, list[TrainingRow]]]:
    """Return batches of about the same number of tokens, in random order.

    Args:
        packed: rows for each length.
        tokens: tokens per batch.
        rng: random number generator.

    Returns:
        Length and rows of each batch.
    """
    batches: list[tuple[int, list[TrainingRow]]] = []
    for length, rows in packed.items():
        rng.shuffle(rows)
        size = max(1, tokens // length)
        batches += [(length, rows[at : at + size]) for at in range(0, len(rows) - size + 1, size)]
    rng.shuffle(batches)
    return batches
