"""Export of the bundled model as a folder in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.bundled_model.conversation import CHAT_TEMPLATE
from tools.bundled_model.corpus import BOS, END, EOS
from tools.bundled_model.data import id_of
from tools.bundled_model.model import SmallLlama


def _write_json(path: Path, content: dict[str, object]) -> None:
    """Write a JSON file.

    Args:
        path: path of the file.
        content: value to write.
    """
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: SmallLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights, the tokenizer and the configuration.

    Args:
        model: trained model.
        tokenizer: tokenizer of the model.
        folder: target folder; created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The library creates a file that only its owner can read.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    bos, eos, end = (id_of(tokenizer, token) for token in (BOS, EOS, END))
    _write_json(folder / "config.json", model.shape.to_config(bos, [eos, end]))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": [eos, end], "do_sample": True, "temperature": 0.5, "top_p": 0.9},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": model.shape.positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
