"""The second part of the corpus of the bundled model: tools and thinking, among the stories and conversations."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from tools.bundled_model.corpus import Document, document
from tools.bundled_model.thoughts import thinking_document
from tools.bundled_model.tool_chats import tool_document

TOOLS_SHARE = 0.65


def mixed_documents(seed: int, share: float) -> Iterator[Document]:
    """Yield an endless stream of documents, some of which are about tools and thinking.

    Args:
        seed: random seed; the same seed gives the same documents.
        share: part of the documents with tools or thinking, from 0 to 1.

    Yields:
        One document after the other; with a share of 0, those of `corpus.documents`.
    """
    rng = random.Random(seed)
    while True:
        if share and rng.random() < share:
            yield tool_document(rng) if rng.random() < TOOLS_SHARE else thinking_document(rng)
        else:
            yield document(rng)


def main() -> None:
    """Print documents for reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    stream = mixed_documents(options.seed, 1.0)
    for _ in range(options.count):
        print("".join(text for text, _ in next(stream)), end="\n\n")


if __name__ == "__main__":
    main()
