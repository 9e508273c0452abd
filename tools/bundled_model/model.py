"""A small Llama in plain torch, with the parameter names that Hugging Face uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of the model.

    Attributes:
        vocab: number of tokens.
        hidden: width of the residual stream.
        layers: number of blocks.
        heads: query heads per block.
        kv_heads: key and value heads per block.
        inner: width of the feed-forward part.
        positions: longest sequence in tokens.
        theta: base of the rotary angles.
        eps: added to the mean square before the root in each norm.
    """

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    inner: int = 704
    positions: int = 1024
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.hidden // self.heads

    def to_config(self, bos: int, eos: list[int]) -> dict[str, object]:
        """Return the ``config.json`` of the model.

        Args:
            bos: id of the token that begins a text.
            eos: ids of the tokens that end a text or a turn.

        Returns:
            The configuration in Hugging Face's form.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rotary_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary angles.

    Args:
        shape: sizes of the model.
        length: number of positions.

    Returns:
        Two tables of ``[length, head_dim]``.
    """
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.theta**-steps)
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with the pairs ``(i, i + half)`` rotated by their angles.

    Args:
        x: heads, ``[batch, heads, length, head_dim]``.
        cos: cosines, ``[length, head_dim]``.
        sin: sines, ``[length, head_dim]``.
    """
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class CausalSelfAttention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the four projections.

        Args:
            shape: sizes of the model.
        """
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """Return the attention output.

        Args:
            x: residual stream, ``[batch, length, hidden]``.
            tables: cosines and sines for the positions.
            bias: zero where a query may attend to a key, and very low elsewhere.

        Returns:
            The update to the residual stream.
        """
        batch, length, _ = x.shape
        size = self.shape.head_dim
        q = self.q_proj(x).view(batch, length, -1, size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, size).transpose(1, 2)
        q, k = rotate(q * size**-0.5, *tables), rotate(k, *tables)
        # The query heads that share a key head are stacked. For rows this short, forward and
        # backward together take less than half the time that scaled_dot_product_attention takes on a processor.
        rows = batch * self.shape.kv_heads
        k, v = k.reshape(rows, length, size).to(v.dtype), v.reshape(rows, length, size)
        scores = q.to(v.dtype).reshape(rows, -1, size) @ k.transpose(1, 2)
        parts = torch.softmax(scores.view(batch, -1, length, length) + bias.to(scores.dtype), dim=-1)
        mixed = (parts.to(v.dtype).view(rows, -1, length) @ v).view(batch, -1, length, size)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """The gated feed-forward part of a block."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the three projections.

        Args:
            shape: sizes of the model.
        """
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward output, position by position.

        Args:
            x: residual stream, ``[batch, length, hidden]``.

        Returns:
            The update to the residual stream.
        """
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the parts of the layer.

        Args:
            shape: sizes of the model.
        """
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = CausalSelfAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            x: residual stream, ``[batch, length, hidden]``.
            tables: cosines and sines for the positions.
            bias: zero where a query may attend to a key, and very low elsewhere.
        """
        x = x + self.self_attn(self.input_layernorm(x), tables, bias)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """The embedding, the blocks and the last norm."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the parts of the stack.

        Args:
            shape: sizes of the model.
        """
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)


class SmallLlama(nn.Module):
    """A Llama whose output layer is its embedding."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the model with random weights.

        Args:
            shape: sizes of the model.
        """
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        cos, sin = rotary_tables(shape, shape.positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The two projections that write to the residual stream begin smaller,
                # so that its scale does not grow with the number of layers.
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if writes else 0.04)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at every position, ``[batch, length, vocab]``.

        Args:
            tokens: token ids, ``[batch, length]``.
            mask: True where a query may attend to a key, ``[batch, 1, length, length]``; causal unless given.
        """
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        if torch.is_autocast_enabled("cpu"):
            bias = bias.to(torch.get_autocast_dtype("cpu"))
        x: Tensor = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, (cos, sin), bias)
        return nn.functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
