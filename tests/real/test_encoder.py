"""Embeddings of published encoders are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from quire import LLM
from tests.real.models import encoders

TEXTS = [
    "The ferry leaves at six in the morning.",
    "Das Schiff legt um sechs Uhr ab.",
    "def add(a, b): return a + b",
    "A word",
    "Boats and islands. " * 40,
]


@pytest.mark.parametrize("folder", encoders(), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_embeddings_are_those_of_transformers(folder: Path, dtype: str, least: float) -> None:
    """Means over tokens, of length 1."""
    library: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            inputs = library(text, return_tensors="pt")
            expected.append(functional.normalize(model(**inputs).last_hidden_state[0].mean(0), dim=0))
    with LLM(str(folder), dtype=dtype) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    cosines = (found * torch.stack(expected)).sum(-1)
    assert cosines.min() >= least
    # A wrong model would not tell these texts from one another in the same way.
    torch.testing.assert_close(found @ found.T, torch.stack(expected) @ torch.stack(expected).T, rtol=0, atol=0.02)
