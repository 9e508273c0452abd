"""Write a checkpoint that copies its prompt: `python -m benchmarks.make_copier`.

Drafts gain where a model repeats what stands in its prompt, and random weights do not. These are set by hand to: an
induction circuit (arXiv 2209.11895) in the first two layers of Qwen3's architecture finds where the last three tokens
stood before, and predicts the token after them. All other weights are random, and what they add to the hidden states is
too small to matter; so a step does the work of a step of any model with this shape.

```
 hidden    | code of the token | constant | codes of the 1st, 2nd, 3rd token before it |
 layer 0     three heads look 1, 2 and 3 positions back, and write the code that they find there
 layer 1     four heads look where 1st, 2nd, 3rd before are here's token, 1st, 2nd before; they add the code found there
 head        the embeddings: the token whose code is the hidden state's
```
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.make_model import FOLDER, QWEN3, is_written, random_weight, save, shapes

# Rotations slow enough that a match a thousand tokens away is one still.
COPIER = QWEN3 | {"rope_theta": 1e9}
# The draft model: the same vocabulary and the same circuit, without the layers that do nothing.
SMALL = COPIER | {"num_hidden_layers": 2, "intermediate_size": 128}
MODELS = {"qwen3-0.6b-copier": COPIER, "qwen3-0.6b-copier-draft": SMALL}
NUM_BACK = 3
# A token's code, what it is cut into for the heads that copy it, and its shorter form for comparisons.
CODE, NUM_PARTS, SHORT = 448, 4, 128
CONSTANT = CODE
# Pairs of a head's values that rotate fast enough to tell positions apart, and slowly enough not to.
FAST, SLOW = slice(0, 12), slice(26, 64)
# Margin of a right position over a wrong one, in units of the softmax; weight of a copy in the token's code.
SHARPNESS, STRENGTH = 14.0, 6.0
# Scale of the other weights.
FAINT = 1e-4


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a copier.

    Args:
        config: Qwen3 config with hidden states of at least 961 values, heads of 128, five KV heads or more.
    """
    generator = torch.Generator().manual_seed(4321)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {name: random_weight(shape, generator) for name, shape in sorted(shapes(config).items())}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= FAINT
    embeddings = tensors["model.embed_tokens.weight"].zero_()
    embeddings[:, :CODE] = random(config["vocab_size"], CODE) / math.sqrt(CODE)
    embeddings[:, CONSTANT] = 1.0
    shorten = random(SHORT, CODE) / math.sqrt(SHORT)
    earlier = [slice(CODE + 1 + back * SHORT, CODE + 1 + (back + 1) * SHORT) for back in range(NUM_BACK)]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    half = config["head_dim"] // 2
    frequencies = config["rope_theta"] ** (-torch.arange(half) / half)

    # Layer 0: a key that is the same everywhere, and a query that is it, turned back by some positions.
    layer, before = _CopierLayer(tensors, 0, group, config["head_dim"]), _root_mean_square(2, config)
    for back in range(NUM_BACK):
        query, key, value, output = layer.head(back)
        angles = -(back + 1) * frequencies[FAST]
        key[:half][FAST, CONSTANT] = 1.0
        query[:half][FAST, CONSTANT], query[half:][FAST, CONSTANT] = torch.cos(angles), torch.sin(angles)
        value[:SHORT, :CODE] = shorten
        output[earlier[back], :SHORT] = torch.eye(SHORT) * before
    # One position further, the mean cosine of the fast pairs is about 0.1 less.
    layer.sharpen(SHARPNESS / 0.1)

    # Layer 1: a key of what stands before, and a query of what stands there now.
    layer, before = _CopierLayer(tensors, 1, group, config["head_dim"]), _root_mean_square(2 + NUM_BACK, config)
    count = SLOW.stop - SLOW.start
    mix = [random(2 * count, SHORT) for _ in range(NUM_BACK)]
    for part in range(NUM_PARTS):
        query, key, value, output = layer.head(part)
        for back in range(NUM_BACK):
            for pairs, matrix in ((slice(0, half), mix[back][:count]), (slice(half, None), mix[back][count:])):
                key[pairs][SLOW, earlier[back]] = matrix
                if back:
                    query[pairs][SLOW, earlier[back - 1]] = matrix
                else:
                    query[pairs][SLOW, :CODE] = matrix @ shorten
        codes = slice(part * CODE // NUM_PARTS, (part + 1) * CODE // NUM_PARTS)
        length = codes.stop - codes.start
        value[:length, codes] = torch.eye(length)
        output[codes, :length] = torch.eye(length) * STRENGTH * before
    # Two tokens of three that match are worth two thirds.
    layer.sharpen(SHARPNESS * 3)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _root_mean_square(num_parts: int, config: dict[str, Any]) -> float:
    """Return what a layer's norm divides hidden states by that are made up of parts, each of norm 1."""
    return math.sqrt(num_parts / float(config["hidden_size"]))


class _CopierLayer:
    """The attention of one layer, its heads emptied as they are asked for."""

    def __init__(self, tensors: dict[str, Tensor], layer: int, group: int, head_dim: int) -> None:
        self._weights = {name: tensors[f"model.layers.{layer}.self_attn.{name}.weight"] for name in _NAMES}
        self._group, self._head_dim = group, head_dim

    def head(self, idx: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the parts of the weights of KV head `idx` and of its first query head, all zeros."""
        kv = slice(idx * self._head_dim, (idx + 1) * self._head_dim)
        first = idx * self._group * self._head_dim
        query = slice(first, first + self._head_dim)
        weights = self._weights
        parts = (weights["q_proj"][query], weights["k_proj"][kv], weights["v_proj"][kv], weights["o_proj"][:, query])
        for part in parts:
            part.zero_()
        return parts

    def sharpen(self, score: float) -> None:
        """Have a query and a key that are the same, and of norm 1 in each value, give a score."""
        scale = math.sqrt(score / math.sqrt(self._head_dim))
        self._weights["q_norm"].fill_(scale)
        self._weights["k_norm"].fill_(scale)


_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def ensure(name: str) -> Path:
    """Return the folder of a model, written first where it is missing."""
    folder = FOLDER / name
    if not is_written(folder):
        print(f"writing a model that copies to {folder}", flush=True)
        save(MODELS[name], tensors_of(MODELS[name]), folder)
    return folder


def main() -> None:
    """Write the checkpoints."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in MODELS:
        print(ensure(name))


if __name__ == "__main__":
    main()
