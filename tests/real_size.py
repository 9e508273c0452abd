"""Vocabularies of the sizes that published models have, made by rule, and checkpoints that have them.

A path that is quick with the small tokenizers of other tests may take minutes with a real one, or stop all threads for
seconds. Making a vocabulary takes seconds as well, so a run makes one of each size: see the fixtures in `conftest.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from quire.platform.file_lock import wait_for_lock
from quire.text.vocabulary.components import byte_alphabet

# Numbers of ids: those of Qwen 3 without the padding of its logits, and of Gemma 3.
BYTE_LEVEL_SIZE = 151_936
BYTE_FALLBACK_SIZE = 262_144
# Ids without a token, before the added tokens of the byte-level vocabulary.
NUM_HOLES = 11
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
SCRIPTS = (
    ("etaoinsrhldcumfpgwybvkxjqz", 14),
    ("абвгдежзийклмнопрстуфхцчшщъыьэюя", 9),
    ("αβγδεζηθικλμνξοπρστυφχψω", 8),
    ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", 7),
    ("".join(map(chr, range(0x4E00, 0x4E00 + 3000))), 3),
    ("".join(map(chr, range(0xAC00, 0xAC00 + 2000))), 3),
    ("{}()[];:=<>+-*/\\|&%$#@!?.,'\"_~^`", 6),
)
# Words of each script among 23.
SHARES = (12, 3, 1, 1, 3, 2, 1)
# Letters of scripts of which no words are made, but which have tokens of their own.
OTHER_LETTERS = "".join(map(chr, (*range(0xC0, 0x250), *range(0x900, 0xE00), *range(0x3040, 0x3100))))
MARK = "▁"


class RealVocabulary(NamedTuple):
    """The vocabulary of a byte-pair encoding.

    Args:
        kind: "byte level" as Qwen's, or "byte fallback" as Gemma's.
        tokens: text of each token by its id, as the model of the library has it; None for an id without a token.
        merges: both parts of each merge, in order.
        special: ids of special tokens.
        added: ids of all tokens that are matched before the model divides a text, the special ones included.
    """

    kind: str
    tokens: tuple[str | None, ...]
    merges: tuple[tuple[str, str], ...]
    special: tuple[int, ...]
    added: tuple[int, ...]


def byte_level_vocabulary(num_ids: int = BYTE_LEVEL_SIZE) -> RealVocabulary:
    """Return a vocabulary like that of Qwen 3: bytes, a merge for each further token, added tokens after a hole."""
    chars = {byte: char for char, byte in byte_alphabet().items()}
    num_words = num_ids - NUM_HOLES - len(QWEN_ADDED)
    tokens: dict[str, None] = dict.fromkeys(chars.values())
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in tokens and len(tokens) < num_words:
            tokens[left + right] = None
            merges.append((left, right))

    for texts in _splits(num_ids, " "):
        left, right = ("".join(map(chars.__getitem__, text.encode())) for text in texts)
        # A character of several bytes is merged byte by byte.
        for part in (left, right):
            for end in range(2, len(part) + 1):
                merge(part[: end - 1], part[end - 1])
        merge(left, right)
        if len(tokens) == num_words:
            break
    added = tuple(range(num_ids - len(QWEN_ADDED), num_ids))
    special = tuple(token_id for token_id, text in zip(added, QWEN_ADDED, strict=True) if text.startswith("<|"))
    return RealVocabulary("byte level", (*tokens, *[None] * NUM_HOLES, *QWEN_ADDED), tuple(merges), special, added)


def byte_fallback_vocabulary(num_ids: int = BYTE_FALLBACK_SIZE) -> RealVocabulary:
    """Return a vocabulary like that of Gemma 3: thousands of unused added tokens, bytes, all merges of each token."""
    added = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<unused{idx}>" for idx in range(100))]
    added += ["<start_of_turn>", "<end_of_turn>"]
    unused = [f"<unused{idx}>" for idx in range(100, 100 + num_ids // 43)]
    last = num_ids - len(unused)
    tokens: dict[str, None] = dict.fromkeys([*added, *(f"<0x{byte:02X}>" for byte in range(256))])
    first = len(tokens)
    tokens |= dict.fromkeys("".join(letters for letters, _ in SCRIPTS) + OTHER_LETTERS + "0123456789\n\t" + MARK)
    tokens |= dict.fromkeys(char * count for char in (MARK, "\n", "\t") for count in range(2, 32))
    for left, right in _splits(num_ids, MARK):
        tokens[left] = tokens[left + right] = None
        if len(tokens) >= last:
            break
    words = list(tokens)[first:last]
    known = set(words)
    merges = tuple(
        (word[:end], word[end:])
        for word in words
        for end in range(1, len(word))
        if word[:end] in known and word[end:] in known
    )
    is_added = (*range(len(added)), *range(last, num_ids))
    return RealVocabulary("byte fallback", (*list(tokens)[:last], *unused), merges, is_added, is_added)


def tokenizer_json(vocabulary: RealVocabulary) -> dict[str, Any]:
    """Return a vocabulary as the content of a `tokenizer.json`."""
    is_byte_level = vocabulary.kind == "byte level"
    special = set(vocabulary.special)
    added = [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in special,
        }
        for token_id in vocabulary.added
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if is_byte_level else "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": not is_byte_level,
        "byte_fallback": not is_byte_level,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token is not None},
        "merges": vocabulary.merges,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    space, mark = {"String": " "}, {"String": MARK}
    split = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    steps = [{"type": "Replace", "pattern": mark, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if is_byte_level else {"type": "Replace", "pattern": space, "content": MARK},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}
        if is_byte_level
        else {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": byte_level if is_byte_level else {"type": "Sequence", "decoders": steps},
        "model": model,
    }


def write_checkpoint(folder: Path, vocabulary: RealVocabulary) -> None:
    """Write a folder with a model of random weights and one narrow layer, whose head has the vocabulary's ids."""
    num_ids, width = len(vocabulary.tokens), 16
    start, end = ("<|im_start|>", "<|im_end|>") if vocabulary.kind == "byte level" else ("<start_of_turn>", "<eos>")
    template = (
        "{% for message in messages %}" + start + "{{ message.role }}\n{{ message.content }}" + end + "\n{% endfor %}"
    )
    generator = torch.Generator().manual_seed(num_ids)
    shapes = {"self_attn.o_proj": (width, width), "mlp.down_proj": (width, 2 * width)}
    shapes |= dict.fromkeys([f"self_attn.{name}_proj" for name in "qkv"], (width, width))
    shapes |= dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (2 * width, width))
    weights = {
        f"model.layers.0.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(width)
    weights["model.embed_tokens.weight"] = torch.randn((num_ids, width), generator=generator)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "vocab_size": num_ids,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": vocabulary.tokens.index(end),
    }
    settings = {"eos_token": end, "chat_template": template}
    texts = {"config": config, "tokenizer_config": settings, "tokenizer": tokenizer_json(vocabulary)}
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")


def made_once(shared: Path, make: Callable[[], RealVocabulary]) -> Path:
    """Return a checkpoint's folder that one process of a test run writes, and all others wait for.

    Args:
        shared: folder that all processes of the run share.
        make: one of the functions above.
    """
    folder = shared / make.__name__
    with open(folder.with_suffix(".lock"), "wb") as lock:
        assert wait_for_lock(lock.fileno(), 120.0), f"{folder} is not written in two minutes"
        if not folder.is_dir():
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir()
            write_checkpoint(unfinished, make())
            unfinished.rename(folder)
    return folder


def _splits(seed: int, space: str) -> Iterator[tuple[str, str]]:
    """Yield the two parts of each further word, both of earlier words or letters, without end.

    Short and early words become parts of many others, as in a trained vocabulary; about a half begin with a space.
    """
    number = random.Random(seed).random
    known = [[*letters] for letters, _ in SCRIPTS]
    turns = [idx for idx, share in enumerate(SHARES) for _ in range(share)]
    seen: set[str] = set()
    while True:
        script = turns[int(len(turns) * number())]
        words = known[script]
        first, second = words[int(len(words) * number() ** 2)], words[int(len(words) * number() ** 2)]
        word = first + second
        if len(word) > SCRIPTS[script][1]:
            continue
        if word not in seen:
            seen.add(word)
            words.append(word)
            yield first, second
            if number() < 0.3 and word.isascii() and word.isalpha():
                yield word[0].upper(), word[1:]
        if number() < 0.6 and space + word not in seen:
            seen.add(space + word)
            yield space, word
