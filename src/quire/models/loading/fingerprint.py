"""A digest of everything besides tokens on which a model's keys and values depend: weights, configuration, kernels.

Names, sizes and headers do not distinguish fine-tuned weights, and a sample of their bytes may not either. So every
byte is read, once: the digest of a file is stored with its identity in the file system (inode, size, times), and an
unchanged file is not read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.platform.bounded.files import read_json

# Number of digests that are remembered, the last ones, and bytes of all of them.
MAX_KNOWN = 4096
MAX_KNOWN_BYTES = 1 << 20


def fingerprint(checkpoint: Checkpoint, layout: Sequence[str], digest_file: Path | None, num_bytes: int = 16) -> bytes:
    """Return a digest that differs whenever keys and values could differ.

    Args:
        checkpoint: the model's files; their paths do not matter.
        layout: texts for everything else: dtype, kernels, cache groups.
        digest_file: a JSON file with known digests of files, created if it does not exist or cannot be read. None reads
            all files again.
        num_bytes: number of bytes of the digest.
    """
    remembered = {} if digest_file is None else _read(digest_file)
    paths = sorted({tensor.path for tensor in checkpoint.tensors.values()})
    digests = {}
    for path in paths:
        # Links are followed; a write to a file, or its replacement, changes one of these values.
        status = path.stat()
        name = json.dumps([status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
        digests[name] = remembered.get(name) or _digest(path)
    if digest_file is not None and not digests.keys() <= remembered.keys():
        part = digest_file.with_name(digest_file.name + ".new")
        part.write_text(json.dumps(dict([*(remembered | digests).items()][-MAX_KNOWN:])))
        os.replace(part, digest_file)
    parts = [json.dumps(dict(checkpoint.config), sort_keys=True), *digests.values(), *layout]
    return blake2b(json.dumps(parts).encode(), digest_size=num_bytes).digest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _read(digest_file: Path) -> dict[str, str]:
    try:
        remembered: Any = read_json(digest_file, MAX_KNOWN_BYTES)
    except (OSError, ValueError):
        return {}
    items = remembered.items() if isinstance(remembered, dict) else ()
    return {name: digest for name, digest in items if isinstance(digest, str)}
