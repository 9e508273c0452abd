"""Tiny checkpoints of Qwen3.5 with a head for multi-token prediction, and a slow twin of the head in torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from tests.conformance.checkpoints import save_checkpoint

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Layers of the tiny target with full attention: their tensors have the shapes of the head's layer.
ATTENTION_LAYER = "model.layers.1."
# The last projections of layers; scaled down, layers add less to the token's own embedding.
ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def save_mtp_checkpoint(folder: Path, noise: float, head_noise: float, **changes: Any) -> Path:
    """Write a target whose next token is a permutation of the last one, and a head that knows it.

    Args:
        folder: folder for the checkpoint.
        noise: factor of what the target's random layers add to the embedding of the last token.
        head_noise: the same of the head's layer, and size of what the head adds for the hidden state. Without any noise
            each draft is right; with much of it, wrong drafts depend on all that the head reads.
        changes: changed fields of the configuration; the second layer stays one of full attention.
    """
    save_checkpoint("qwen3.5", folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(3)

    def noisy(name: str, tensor: Tensor) -> Tensor:
        values = tensor + 0.05 * torch.randn(tensor.shape, generator=random)
        return values * head_noise if name.endswith(ADDED) else values

    embedding = tensors["model.embed_tokens.weight"]
    vocab_size, width = embedding.shape
    for name, tensor in tensors.items():
        if name.endswith(ADDED):
            tensors[name] = tensor * noise
    head = torch.empty_like(embedding)
    head[torch.randperm(vocab_size, generator=random)] = torch.nn.functional.normalize(embedding)
    tensors |= {"lm_head.weight": head, "model.norm.weight": torch.zeros(width)}
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(ATTENTION_LAYER)}
    tensors |= {name.replace(ATTENTION_LAYER, "mtp.layers.0."): noisy(name, tensor) for name, tensor in layer.items()}
    norms = 0.1 * head_noise * torch.randn(len(NORMS), width, generator=random)
    tensors |= {f"mtp.{name}.weight": weight.clone() for name, weight in zip(NORMS, norms, strict=True)}
    mixed = 4 * head_noise * torch.randn(width, width, generator=random) / width**0.5
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(width), mixed], 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return folder


class SlowHead:
    """The head of a checkpoint run over a whole sequence, without a cache, from the parts of transformers.

    Args:
        folder: folder of the checkpoint.
        media: embeddings of the first tokens of all sequences, in place of the tokens' own.
    """

    def __init__(self, folder: Path, media: Tensor | None = None) -> None:
        self._media = media
        self._target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._target.config
        tensors = load_file(folder / "model.safetensors")
        self._input = tensors["mtp.fc.weight"].float()
        self._norms = {name: Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps) for name in NORMS}
        self._layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).float().eval()
        self._rotary = Qwen3_5TextRotaryEmbedding(config)
        prefix = "mtp.layers.0."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self._layer.load_state_dict(own)
        for name, norm in self._norms.items():
            norm.load_state_dict({"weight": tensors[f"mtp.{name}.weight"]})
        self._hidden = cache(self._target_hidden)

    def drafts(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the tokens that the head guesses behind some tokens, one after the other."""
        with torch.inference_mode():
            ids, before = [*token_ids], self._hidden(tuple(token_ids))
            for _ in range(count):
                hidden = self._run(ids, before)[-1:]
                ids.append(int(self._target.lm_head(hidden).argmax()))
                before = torch.cat([before, hidden])
        return tuple(ids[len(token_ids) :])

    def _target_hidden(self, token_ids: tuple[int, ...]) -> Tensor:
        """Return the target's hidden state before each token [T, E], after its last norm; zeros before the first."""
        hidden = self._target.model(inputs_embeds=self._embed(token_ids)[None]).last_hidden_state[0, :-1]
        return torch.cat([torch.zeros(1, hidden.shape[1]), hidden])

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        rows: Tensor = self._target.model.embed_tokens(torch.tensor(token_ids))
        return rows if self._media is None else torch.cat([self._media, rows[len(self._media) :]])

    def _run(self, ids: list[int], before: Tensor) -> Tensor:
        positions = torch.arange(len(ids))[None]
        parts = self._norms["pre_fc_norm_embedding"](self._embed(ids)), self._norms["pre_fc_norm_hidden"](before)
        x = (torch.cat(parts, -1) @ self._input.T)[None]
        rotation = self._rotary(x, positions)
        y = self._layer(x, position_embeddings=rotation, attention_mask=None, position_ids=positions)
        return self._norms["norm"](y[0] if isinstance(y, tuple) else y).squeeze(0)  # type: ignore[no-any-return]
