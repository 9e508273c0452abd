"""The exact twin of a GGUF file, by transformers: `python -m tests.real.make_twin NAME.gguf` writes `NAME.twin/`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.models import twin_of


def make_twin(file: Path) -> Path:
    """Write the model in float32, and the tokenizer that transformers makes of the file's vocabulary."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # It is not quantised any more, and would not be saved otherwise.
    del model.config.quantization_config
    model.hf_quantizer = None
    twin = twin_of(file)
    model.save_pretrained(twin)
    AutoTokenizer.from_pretrained(**source).save_pretrained(twin)
    return twin


if __name__ == "__main__":
    print(make_twin(Path(sys.argv[1])))
