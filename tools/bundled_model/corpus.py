"""The corpus of the bundled model: an endless, seeded stream of stories and conversations."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from tools.bundled_model.chats import ASKERS, Turns, about_record, plain, poem, small_talk, unknown
from tools.bundled_model.stories import cast, long_story, pick, polish, tell
from tools.bundled_model.story_chats import chat, long_chat

BOS, EOS = "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = (BOS, EOS, SYSTEM, USER, ASSISTANT, END)

# A document is a list of pieces of text; the flag is True where the model learns to write the piece.
Document = list[tuple[str, bool]]


def story_document(text: str) -> Document:
    """Return the document of a text that the model may have to continue.

    Args:
        text: text of the document.
    """
    return [(BOS, False), (text + EOS, True)]


def chat_document(system: str | None, turns: Turns) -> Document:
    """Return a conversation in the form of the chat template.

    Args:
        system: system message, if any.
        turns: messages of the user and the assistant.

    Returns:
        The document; the model learns only the assistant's part.
    """
    before = BOS + (f"{SYSTEM}{system}{END}" if system else "")
    pieces: Document = []
    for user, assistant in turns:
        pieces.append((f"{before}{USER}{user}{END}{ASSISTANT}", False))
        pieces.append((assistant + END, True))
        before = ""
    return pieces


def fact_text(rng: random.Random) -> str:
    """Return a paragraph of simple facts.

    Args:
        rng: random number generator.
    """
    askers = tuple(asker for asker in ASKERS if asker not in (plain, small_talk, unknown, poem, about_record))
    answers = (polish(pick(rng, askers)(rng)[1]) for _ in range(rng.randint(2, 6)))
    return " ".join(answer for answer in answers if not answer.startswith(("Yes", "No", "One,")))


def document(rng: random.Random) -> Document:
    """Return a random document.

    Args:
        rng: random number generator.
    """
    chance = rng.random()
    if chance < 0.42:
        return story_document(tell(rng, cast(rng), brief=rng.random() < 0.2))
    if chance < 0.92:
        return chat_document(*chat(rng))
    if chance < 0.955:
        return story_document(fact_text(rng) or "The sky is blue.")
    if chance < 0.985:
        return story_document(long_story(rng, rng.randint(1, 4)))
    return chat_document(*long_chat(rng, rng.randint(6, 18)))


def documents(seed: int) -> Iterator[Document]:
    """Yield an endless stream of documents.

    Args:
        seed: random seed; the same seed gives the same documents.

    Yields:
        One document after the other.
    """
    rng = random.Random(seed)
    while True:
        yield document(rng)


def main() -> None:
    """Print documents for reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    stream = documents(options.seed)
    for _ in range(options.count):
        print("".join(text for text, _ in next(stream)), end="\n\n")


if __name__ == "__main__":
    main()
