"""A tiny Llama that says what the tests want it to say, with its tokenizer: a whole model in one folder, in a moment.

Each token has one likeliest follower: the output layer's row for a follower is the embedding of the token before it.
Attention and the inner layers add a little, so that what was read before counts too. Greedy decoding walks a known
path; hot sampling jumps off it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

CONTEXT = 4096
WIDTH, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
SPECIAL = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
MERGES = [("Ġ", "w"), ("o", "r"), ("l", "d"), ("or", "ld"), ("Ġw", "orld")]
# Behind "Z", or the assistant's mark, the model says this for ever. No token of it comes twice; all but " world" are
# single bytes, so the unicorn takes four tokens.
SAYING = "abcdefg\U0001f984hij\u00e9 worldklmn."
# Behind "Q" it says this and ends.
ANSWER = "xyz"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{% if style is defined %}{{ style }}{% endif %}"
)


def save(
    folder: Path,
    template: str = TEMPLATE,
    more_tokens: Sequence[AddedToken] = (),
    more_paths: Sequence[tuple[float, Sequence[str]]] = (),
) -> Path:
    """Write the checkpoint and return its folder.

    Args:
        folder: where.
        template: of chats.
        more_tokens: added to the vocabulary.
        more_paths: tokens of which each makes the model say the next one, and how strongly, what it says otherwise
            having 0.25. Where the strongest is not allowed, the next one is said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = tokenizer_library()
    library.add_tokens(list(more_tokens))
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    vocab_size = library.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    followers = [(before, after, 0.25) for before, after in _followers(library).items()]
    vocab = library.get_vocab()
    for strength, path in more_paths:
        ids = [vocab[token] for token in path]
        followers += [(before, after, strength) for before, after in pairwise(ids)]
    save_file(_weights(vocab_size, followers), str(folder / "model.safetensors"))
    return folder


def tokenizer_library() -> Library:
    """Return a tokenizer of bytes, with the special tokens."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    library = Library(models.BPE(vocab={name: token_id for token_id, name in enumerate(names)}, merges=MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    library.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return library


def _followers(library: Library) -> dict[int, int]:
    saying, answer, (z, q) = (library.encode(text, add_special_tokens=False).ids for text in (SAYING, ANSWER, "ZQ"))
    assert len(set(saying + answer)) == len(saying) + len(answer)
    paths = [
        [z, *saying, saying[0]],
        [SPECIAL.index("<|assistant|>"), saying[0]],
        [q, *answer, SPECIAL.index("<|eos|>")],
    ]
    return {before: after for path in paths for before, after in pairwise(path)}


def _weights(vocab_size: int, followers: Sequence[tuple[int, int, float]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    embedding = normal(vocab_size, WIDTH, scale=1.0)
    head = torch.zeros(vocab_size, WIDTH)
    for before, after, strength in followers:
        head[after] += embedding[before] * strength
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head + normal(vocab_size, WIDTH)}
    weights["model.norm.weight"] = torch.ones(WIDTH)
    head_dim = WIDTH // HEADS
    for idx in range(LAYERS):
        layer = f"model.layers.{idx}."
        weights[layer + "input_layernorm.weight"] = torch.ones(WIDTH)
        weights[layer + "post_attention_layernorm.weight"] = torch.ones(WIDTH)
        weights[layer + "self_attn.q_proj.weight"] = normal(HEADS * head_dim, WIDTH)
        weights[layer + "self_attn.k_proj.weight"] = normal(KV_HEADS * head_dim, WIDTH)
        weights[layer + "self_attn.v_proj.weight"] = normal(KV_HEADS * head_dim, WIDTH)
        weights[layer + "self_attn.o_proj.weight"] = normal(WIDTH, HEADS * head_dim)
        weights[layer + "mlp.gate_proj.weight"] = normal(INNER, WIDTH, scale=0.03)
        weights[layer + "mlp.up_proj.weight"] = normal(INNER, WIDTH, scale=0.03)
        weights[layer + "mlp.down_proj.weight"] = normal(WIDTH, INNER, scale=0.03)
    return weights
