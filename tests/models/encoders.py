"""Tiny random checkpoints of encoders, with tokenizers, that transformers made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

WORDS = ["red", "kite", "small", "fox", "the", "sailor", "slept", "flies", "toy", "##s", "a", "quick", "sea", "."]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
# The name in transformers, and fields beside the sizes; windows are short, so that texts are longer.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("XLMRoberta", {"pad_token_id": 0, "type_vocab_size": 1}),
    "modernbert": (
        "ModernBert",
        {"local_attention": 8, "global_attn_every_n_layers": 3, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48, "activation": "gelu"},
    ),
    # Its positions begin at 2, and its padding token is 1.
    "mpnet": ("MPNet", {"max_position_embeddings": 66}),
    "nomic": ("NomicBert", {"pad_token_id": 0}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0, "bos_token_id": 1}),
    # A window of 9 tokens is one of 4 on either side; heads that are wider than the width, one of keys and values.
    "embedding-gemma": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "sliding_window": 9, "num_key_value_heads": 1, "head_dim": 12}
        | {"query_pre_attn_scalar": 20, "sliding_window_pattern": 3, "pad_token_id": 0},
    ),
}


def save(folder: Path, family: str, head: str = "Model", **fields: Any) -> Any:
    """Save a checkpoint with random weights, none of them zero, and return transformers' model.

    Args:
        folder: folder of the checkpoint.
        family: name in `FAMILIES`.
        head: ending of the name of the model's class.
        fields: fields of the configuration.
    """
    torch.manual_seed(7)
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more, **fields})
    model = getattr(transformers, name + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 0.5, 0.25)
    model.save_pretrained(folder)
    save_tokenizer(folder, family)
    return model


def save_tokenizer(folder: Path, family: str) -> None:
    """Save a tokenizer of words, with the template of the family: BERT's has token types, RoBERTa's two ends."""
    special = ["<s>", "<pad>", *SPECIAL[2:]] if family == "mpnet" else SPECIAL
    vocab = {token: idx for idx, token in enumerate([*special, *WORDS])}
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.decoder = tokenizers.decoders.WordPiece()
    ends = [(token, vocab[token]) for token in ("<s>", "</s>")]
    second = "</s> $B </s>" if family == "roberta" else "$B:1 </s>:1"
    library.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> {second}",
        special_tokens=ends,
    )
    library.add_special_tokens(SPECIAL)
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | names))


def state_pooling(folder: Path, mode: str, *, normalize: bool = True, **more: Any) -> None:
    """Write the files of sentence-transformers that state a pooling.

    Args:
        folder: folder of the checkpoint.
        mode: field of `1_Pooling/config.json` that is true.
        normalize: whether embeddings are divided by their length.
        more: fields of `config_sentence_transformers.json`.
    """
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"idx": idx, "path": f"{idx}_{name}", "type": f"models.{name}"} for idx, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    state_prompts(folder, **more)


def add_dense(folder: Path, *layers: tuple[torch.Tensor, torch.Tensor | None, str]) -> None:
    """Put dense layers behind the stated pooling.

    Args:
        folder: folder of the checkpoint.
        layers: weight, bias and class of the activation of each.
    """
    modules = json.loads((folder / "modules.json").read_text())
    entries = []
    for idx, (weight, bias, activation) in enumerate(layers, 2):
        path = folder / f"{idx}_Dense"
        path.mkdir(exist_ok=True)
        config: dict[str, Any] = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": bias is not None,
        }
        config["activation_function"] = f"torch.nn.modules.{activation}"
        (path / "config.json").write_text(json.dumps(config))
        tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_file(tensors, path / "model.safetensors")
        entries.append({"idx": idx, "path": path.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps([*modules[:2], *entries, *modules[2:]]))


def state_prompts(folder: Path, **fields: Any) -> None:
    """Write the fields of `config_sentence_transformers.json`."""
    (folder / "config_sentence_transformers.json").write_text(json.dumps(fields))


def leave_prompts_out(folder: Path) -> None:
    """Change the stated pooling: the tokens of prompts are not pooled."""
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "include_prompt": False}))
