"""The bytes of a checkpoint's shape: of its weights, its KV and its decode steps."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointShape(NamedTuple):
    """The sizes that bytes follow from.

    Args:
        num_layers, num_kv_heads, head_dim: dimensions of attention.
        num_linear: parameters of the layers' matrices.
        num_head: parameters of the output head.
        num_other: parameters of norms, and of an embedding that is not the head.
        is_tied: the head is the embedding.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_linear: int
    num_head: int
    num_other: int
    is_tied: bool

    @classmethod
    def read(cls, model: Path) -> CheckpointShape:
        """Return the shape of a checkpoint folder with one safetensors file."""
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        with (model / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes = {name: prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        matrices = {name for name, entry in header.items() if len(entry.get("shape", ())) == 2}
        head = HEAD if HEAD in sizes else EMBEDDING
        linear = sum(sizes[name] for name in matrices - {HEAD, EMBEDDING})
        return cls(
            num_layers=config["num_hidden_layers"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_linear=linear,
            num_head=sizes[head],
            num_other=sum(sizes.values()) - linear - sizes[head],
            is_tied=head == EMBEDDING,
        )

    def kv_token_bytes(self, value_bytes: int = 2) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * value_bytes

    def weight_bytes(self, bits: float = 16) -> int:
        """Return the bytes of all weights, with the matrices in some number of bits and the rest in 16.

        A head that is the embedding is counted again where the matrices have other bits: rows are looked up in it. The
        scales of quantised weights are not counted.
        """
        second = self.num_head if bits != 16 and self.is_tied else 0
        return int((self.num_linear + self.num_head) * bits / 8) + 2 * (self.num_other + second)

    def step_bytes(self, num_context: float, num_seqs: int = 1) -> float:
        """Return the bytes that a decode step of some sequences must read at least, weights and KV in 16 bits.

        Args:
            num_context: tokens of each sequence, the mean will do.
            num_seqs: sequences of the step.
        """
        return 2 * (self.num_linear + self.num_head) + num_seqs * num_context * self.kv_token_bytes()
