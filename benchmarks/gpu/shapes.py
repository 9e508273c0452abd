"""The shapes that are measured, and their roofline: bytes and operations, and the least time for them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Shape(NamedTuple):
    """The shape of a dense model in 16 bits."""

    name: str
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_qwen3: bool = False

    @property
    def params_read(self) -> int:
        """Weights that every step reads: all but the embedding's."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.width
        output = self.num_heads * self.head_dim * self.width
        return self.num_layers * (qkv + output + 3 * self.ffn_width * self.width) + self.vocab_size * self.width

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of the shape."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.is_qwen3 else "LlamaForCausalLM"],
            "model_type": "qwen3" if self.is_qwen3 else "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.ffn_width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "tie_word_embeddings": self.is_qwen3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }


LLAMA_8B: Final = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN_06B: Final = Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936, is_qwen3=True)
# A shape for a rehearsal on a CPU: it shows that the benchmark runs, and measures nothing.
REHEARSED: Final = Shape("rehearsal", 2, 64, 96, 4, 2, 16, 199, is_qwen3=True)


class Ceilings(NamedTuple):
    """The ceilings of a GPU.

    Args:
        name: name of the GPU.
        bytes_per_s: bytes per second that a copy reads and writes.
        flops_per_s: operations per second of a dense bfloat16 matmul.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float


# Ceilings for predictions where nothing can be measured: nine tenths of the vendor's memory bandwidth, and four fifths
# of the vendor's matmul throughput.
STATED: Final = (
    Ceilings("A100 80GB", 1.83e12, 2.5e14),
    Ceilings("H100 SXM", 3.0e12, 7.9e14),
    Ceilings("H200", 4.3e12, 7.9e14),
)


def decode_floor(shape: Shape, batch: int, context: int, rates: Ceilings) -> float:
    """Return the least seconds of a decode step: the weights' traffic or matmuls, plus the reads of the KV cache."""
    products = max(2 * shape.params_read / rates.bytes_per_s, 2 * batch * shape.params_read / rates.flops_per_s)
    return products + batch * context * shape.kv_bytes / rates.bytes_per_s


def attention_flops(shape: Shape, num_tokens: int) -> float:
    """Return the operations of one layer's causal attention over a whole prompt."""
    return 2.0 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1)


def prompt_floor(shape: Shape, num_tokens: int, rates: Ceilings) -> float:
    """Return the least seconds of a prompt's step."""
    layers = 2.0 * num_tokens * (shape.params_read - shape.vocab_size * shape.width)
    return (layers + shape.num_layers * attention_flops(shape, num_tokens)) / rates.flops_per_s
