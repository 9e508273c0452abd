"""The text on which `quire quantize` calibrates by default: `python -m tools.bundled_model.calibration FILE`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tools.bundled_model.corpus import ASSISTANT, BOS, END, EOS, SYSTEM, USER, documents

# Training took seeds 7, 8 and 9; benchmarks measure on 9.
SEED = 10
NUM_DOCUMENTS = 200
ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}


def lines(count: int = NUM_DOCUMENTS) -> Iterator[str]:
    """Yield documents as lines of JSON: texts, and conversations as messages.

    Args:
        count: number of documents.
    """
    for pieces in islice(documents(SEED), count):
        whole = "".join(text for text, _ in pieces).removeprefix(BOS)
        parts = re.split(f"({'|'.join(map(re.escape, ROLES))})", whole)
        messages = [
            {"role": ROLES[role], "content": content.removesuffix(END)}
            for role, content in zip(parts[1::2], parts[2::2], strict=True)
        ]
        yield json.dumps({"messages": messages} if messages else {"text": whole.removesuffix(EOS)})


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("src/quire/models/bundled/calibration.jsonl"))
    parser.parse_args().file.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
