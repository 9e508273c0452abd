"""Whatever an adapter's folder holds: reading it works, or fails with a typed error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import CheckpointError
from tests.hostile.adapters import AdapterMaker
from tests.models.adapters.test_peft_folder import read, write

NUM_SEEDS = 150
MAX_MESSAGE = 1000


@pytest.mark.parametrize("kind", ["config", "tensors", "bytes"])
def test_a_damaged_adapter_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    maker = AdapterMaker(write(tmp_path / "good", target_modules="all-linear"))
    num_refused = 0
    for seed in range(NUM_SEEDS):
        folder = maker.make(kind, seed, tmp_path / f"{kind}-{seed}")
        refusal = ""
        try:
            read(folder)
        except CheckpointError as error:
            refusal = str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed} of {kind}") from error
        if refusal:
            assert str(folder) in refusal, seed
            assert len(refusal) < MAX_MESSAGE, seed
        num_refused += bool(refusal)
    assert NUM_SEEDS // 50 < num_refused < NUM_SEEDS - NUM_SEEDS // 50
