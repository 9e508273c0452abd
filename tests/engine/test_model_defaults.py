"""The sampling parameters that a checkpoint recommends: those of folders, and those in the metadata of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.engine.startup.model_defaults import (
    GGUF_FIELDS,
    GGUF_PREFIX,
    GGUF_UNSERVED,
    GGUF_WINDOW,
    read_default_params,
)
from quire.models.checkpoints.checkpoint import Checkpoint

# Settings of methods that are off without another field.
SETTINGS = {"xtc_threshold", "mirostat_tau", "mirostat_eta"}


def of_file(**fields: Any) -> Checkpoint:
    """Return a GGUF checkpoint with these sampling fields."""
    named = {name if "." in name else f"{GGUF_PREFIX}{name}": value for name, value in fields.items()}
    return Checkpoint(Path("folder"), {}, {}, {}, named, gguf_path=Path("folder/model.gguf"))


def float32(value: float) -> float:
    return float(np.float32(value))


def test_all_fields_of_the_converter_are_known() -> None:
    written = {value for name, value in vars(gguf.Keys.General).items() if name.startswith("SAMPLING_")}
    known = {*GGUF_UNSERVED, GGUF_WINDOW, *(f"{GGUF_PREFIX}{name}" for name in (*GGUF_FIELDS, *SETTINGS))}
    assert written == {name for name in known if name.startswith(GGUF_PREFIX)}


def test_a_file_recommends_what_its_folder_did(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = of_file(
        temp=float32(0.6), top_k=20, top_p=float32(0.95), min_p=float32(0.05), penalty_repeat=float32(1.1)
    )
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert read_default_params(checkpoint, "auto") == expected
    assert read_default_params(checkpoint, "vllm") == {}
    assert read_default_params(of_file(), "auto") == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temp": -1.0}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"top_p": [0.9]}, "top_p"),
        ({"mirostat": 2}, "general.sampling.mirostat is 2, which is not served"),
        ({"xtc_probability": 0.5}, "general.sampling.xtc_probability is 0.5, which is not served"),
        ({"sequence": "penalties;temperature"}, "general.sampling.sequence is 'penalties;temperature', which is not"),
        ({"tokenizer.ggml.suppress_tokens": [3, 4]}, "tokenizer.ggml.suppress_tokens is [3, 4], which is not served"),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64}, "general.sampling.penalty_last_n is 64, which is not served"),
    ],
)
def test_what_is_not_honoured_is_said(fields: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    params = read_default_params(of_file(**fields), "auto")
    assert params.keys() <= {"repetition_penalty"}
    assert words in caplog.text
    assert "model.gguf" in caplog.text


def test_neutral_values_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    neutral = of_file(mirostat=0, mirostat_tau=5.0, xtc_probability=0.0, xtc_threshold=0.1, penalty_last_n=64)
    assert read_default_params(neutral, "auto") == {}
    whole = of_file(penalty_repeat=float32(1.2), penalty_last_n=-1)
    assert read_default_params(whole, "auto") == {"repetition_penalty": 1.2}
    assert not caplog.records


def test_a_folder_beside_a_file_is_not_its_own(tmp_path: Path) -> None:
    """A file is whole by itself; a generation_config.json beside it may be of another model."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.1, "eos_token_id": 5}))
    checkpoint = Checkpoint(tmp_path, {}, {}, {}, {"general.sampling.temp": 0.5}, gguf_path=tmp_path / "model.gguf")
    assert read_default_params(checkpoint, "auto") == {"temperature": 0.5}
    folder = Checkpoint(tmp_path, {}, {"temperature": 0.1, "do_sample": False, "top_k": -7}, {})
    assert read_default_params(folder, "auto") == {"temperature": 0.0}
