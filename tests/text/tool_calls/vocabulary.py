"""The bundled model's vocabulary, with tokens added as models that call tools have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

import quire

BUNDLED = Path(quire.__file__).parent / "models" / "bundled" / "tokenizer.json"


def vocabulary(
    markers: Sequence[str], kind: str, *, special: Iterable[str] = (), shown: Iterable[str] = ()
) -> tuple[Library, dict[str, int]]:
    """Return a vocabulary, and the ids of the markers that are tokens of it.

    Args:
        markers: of the format.
        kind: how the vocabulary has them: "special" or "plain" tokens, or "none".
        special: other special tokens.
        shown: other added tokens that are none.
    """
    stored = json.loads(BUNDLED.read_text(encoding="utf-8"))
    # The bundled model has markers of its own; each caller says which ones its vocabulary has.
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["id"] < len(stored["model"]["vocab"])]
    library = Library.from_str(json.dumps(stored))
    known = () if kind == "none" else markers
    for texts, is_special in ((known, kind == "special"), (special, True), (shown, False)):
        library.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in texts])
    vocab = library.get_vocab()
    return library, {text: vocab[text] for text in known}
