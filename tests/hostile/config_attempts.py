"""Reads the configurations of standard input, natively where a family does, and as transformers' modules, in forks."""

from __future__ import annotations

import json

from tests.forked import serve

MEMORY_BYTES = 1 << 30
TIMEOUT_S = 30


def attempt(line: str) -> str:
    """Return what came of a configuration, for each way to compute it."""
    from quire.errors import QuireError
    from quire.models.families import build, find_family
    from quire.models.hosted.trial import examine

    config = json.loads(line)
    happened = []
    for read in (build, examine) if find_family(config) else (examine,):
        try:
            read(config)
            happened.append("read")
        except QuireError as error:
            happened.append(f"refused: {error}")
    return json.dumps(happened)


def main() -> None:
    """Serve attempts until there are no more."""
    import transformers

    import quire.models.hosted.trial  # noqa: F401

    # Imported before the forks, whose memory is limited.
    assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    serve(attempt, MEMORY_BYTES, TIMEOUT_S)


if __name__ == "__main__":
    main()
