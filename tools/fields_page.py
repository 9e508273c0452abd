"""Writes docs/fields.md from the tables of request fields: python -m tools.fields_page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from quire.server.protocols import (
    anthropic_messages,
    chat_completions,
    completions,
    ollama,
    ollama_embed,
    pooling,
    responses,
    tokens,
)
from quire.server.requests.fields import RouteFields

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
WIDTH = 120
TABLES: Mapping[str, RouteFields] = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": anthropic_messages.FIELDS,
    "/api/chat": ollama.CHAT_FIELDS,
    "/api/generate": ollama.GENERATE_FIELDS,
    "/api/show": ollama.SHOW_FIELDS,
    "/api/embed": ollama_embed.EMBED_FIELDS,
    "/api/embeddings": ollama_embed.EMBED_ONE_FIELDS,
    "/v1/embeddings": pooling.EMBEDDING_FIELDS,
    "/v1/score": pooling.SCORE_FIELDS,
    "/v1/rerank": pooling.RERANK_FIELDS,
    "/classify": pooling.CLASSIFY_FIELDS,
    "/tokenize": tokens.TOKENIZE_FIELDS,
    "/detokenize": tokens.DETOKENIZE_FIELDS,
}
HEAD = """# Request fields

`python -m tools.fields_page` writes this page from the tables by which the server reads requests, and a test compares
the two. A field is **honoured**; or **refused**, with a 400 and the code `unsupported_feature`, unless it is absent,
`null` or has a value that changes nothing; or it has **no effect**, because no answer would differ. Names with a dot
are fields of an object in the body. Unknown fields are ignored, with one warning for each name in the log, since
clients send new fields before servers support them. Other routes that read the same fields are
`/v1/messages/count_tokens`, `/v1/responses/input_tokens`, `/score`, `/v2/rerank` and `/rerank`.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for path, fields in TABLES.items():
        parts.append(f"## `POST {path}`\n")
        parts.append(
            textwrap.fill(f"Honoured: {_listed(sorted(fields.honoured))}.", WIDTH, break_on_hyphens=False) + "\n"
        )
        refused = {name: (_values(neutral), why) for name, (neutral, why) in fields.refused.items()}
        parts += _table(("refused", "unless", "reason"), refused)
        parts += _table(("no effect", "reason"), {name: (why,) for name, why in fields.neutral.items()})
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a table, in which fields with the same cells share a row."""
    if not rows:
        return []
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        names.setdefault(cells, []).append(name)
    lines = [head, ("---",) * len(head), *((_listed(shared), *cells) for cells, shared in names.items())]
    return ["".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("---|", "---|")]


def _values(values: Iterable[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
