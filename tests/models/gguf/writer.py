"""GGUF files of Hugging Face checkpoints, with the names, fields and changes of weights of llama.cpp's converter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from tests.models.gguf.changes import CHANGES, Tensors, stack_experts
from tests.models.gguf.fields import ARCHITECTURES, add_fields, common_names, frequency_factors

# Chooses the type of a matrix, given its name in the file and its shape.
TypeOf = Callable[[str, tuple[int, ...]], Type]
# Matrices that converters never quantise: convolutions, vectors with dimensions of size 1, and biases of experts.
PLAIN = (".bias", "conv", "ssm_a", "ssm_d", "ssm_norm")
# Parts of the names of a vision encoder, and what converters make of them, in this order.
MMPROJ_NAMES = (
    *(("blocks.", "v.blk."), ("attn.qkv", "attn_qkv"), ("attn.proj", "attn_out"), ("norm1", "ln1"), ("norm2", "ln2")),
    *(("mlp.linear_fc1", "ffn_up"), ("mlp.linear_fc2", "ffn_down"), ("deepstack_merger_list", "v.deepstack")),
    *(("merger.norm", "v.post_ln"), ("merger.linear_fc1", "mm.0"), ("merger.linear_fc2", "mm.2")),
    *(("linear_fc", "fc"), ("patch_embed.proj", "v.patch_embd"), ("pos_embed", "v.position_embd")),
)
# Fields with the token of an image, and its text in a vocabulary.
IMAGE_TOKENS = {"image_token_id": "<|image_pad|>", "image_token_index": "<image_soft_token>"}
# Types of tokens.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_gguf(folder: Path, out: Path, type_of: TypeOf, *, pre: str = "default", fuses_qkv: bool = False) -> Path:
    """Write a checkpoint as a GGUF file.

    Args:
        folder: folder of the checkpoint.
        out: path of the file.
        type_of: function that chooses the type of a matrix; vectors are float32.
        pre: name of the tokenizer's splits of texts, where the folder has a tokenizer of byte-level BPE.
        fuses_qkv: True where layers with queries, keys and values of their own have them in one tensor.

    Returns:
        `out`.
    """
    config = common_names(_of_language_model(AutoConfig.from_pretrained(folder).to_dict()))
    architecture = ARCHITECTURES[config["architectures"][0]](config)
    num_blocks = config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0)
    name_map = gguf.get_tensor_name_map(architecture, num_blocks)
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    add_fields(writer, config, architecture)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder, pre)
    for name, text in IMAGE_TOKENS.items():
        if name in config and not (folder / "tokenizer.json").is_file():
            texts = [f"token {number}" for number in range(config["vocab_size"])]
            texts[config[name]] = text
            writer.add_token_list(texts)
    tensors = {
        name.replace("model.language_model.", "model.").removeprefix("language_model."): values
        for path in sorted(folder.glob("*.safetensors"))
        for name, values in load_file(path).items()
        if not name.startswith(("model.visual.", "vision_tower.", "multi_modal_projector."))
    }
    changed = CHANGES.get(architecture, _same)(tensors, config)
    stored: dict[str, Tensor] = {}
    for name, values in stack_experts(changed).items():
        own = name if name.startswith("blk.") else name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, f"{name} has no name in files"
        stored[own] = values
    for name, values in (fuse_qkv(stored) if fuses_qkv else stored).items():
        _add(writer, name, values, type_of)
    for name, factors in frequency_factors(config).items():
        _add(writer, name, factors, type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _of_language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a language model that is a part of another one, with the names of the whole."""
    if "vision_config" not in config:
        return config
    names = ("architectures", "vision_config", "tie_word_embeddings", *IMAGE_TOKENS)
    return {**config["text_config"], **{name: config[name] for name in names if name in config}}


def write_mmproj(folder: Path, out: Path, type_of: TypeOf, *, swaps_mlps: bool = False) -> Path:
    """Write the vision encoder of a Qwen3-VL, a Qwen3.5 or a Gemma 3 as a GGUF file; see `write_gguf`.

    Args:
        folder, out, type_of: as there.
        swaps_mlps: True to name both matrices of an MLP as Gemma 3's first files do.
    """
    config = AutoConfig.from_pretrained(folder).to_dict()
    vision, settings = config["vision_config"], json.loads((folder / "preprocessor_config.json").read_text())
    writer = GGUFWriter(out, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    tensors = load_file(folder / "model.safetensors")
    if "mm_tokens_per_image" in config:
        _add_gemma3_encoder(writer, config, tensors, type_of, swaps_mlps)
    else:
        _add_qwen_encoder(writer, vision, settings, tensors, type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_qwen_encoder(
    writer: GGUFWriter, vision: dict[str, Any], settings: dict[str, Any], tensors: Tensors, type_of: TypeOf
) -> None:
    """Add Qwen's fields, and limits of pixels, which the converter leaves out."""
    deepstack = vision.get("deepstack_visual_indexes", [])
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_image_size(math.isqrt(vision["num_position_embeddings"]) * vision["patch_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_is_deepstack_layers([idx in deepstack for idx in range(vision["depth"])])
    writer.add_uint32("clip.vision.image_min_pixels", settings["size"]["shortest_edge"])
    writer.add_uint32("clip.vision.image_max_pixels", settings["size"]["longest_edge"])
    for name, values in tensors.items():
        if name.startswith("model.visual."):
            stored = _mmproj_name(name.removeprefix("model.visual."), deepstack)
            frames = [values] if values.dim() < 5 else values.unbind(2)
            for frame, part in enumerate(frames):
                _add(writer, f"{stored}.{frame}" if frame else stored, part, type_of)


def _add_gemma3_encoder(
    writer: GGUFWriter, config: dict[str, Any], tensors: Tensors, type_of: TypeOf, swaps_mlps: bool
) -> None:
    vision = config["vision_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    writer.add_clip_projector_type(gguf.VisionProjectorType.GEMMA3)
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    side = vision["image_size"] // vision["patch_size"]
    writer.add_vision_projector_scale_factor(side // math.isqrt(config["mm_tokens_per_image"]))
    for name, values in tensors.items():
        if name.startswith("language_model."):
            continue
        known = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"{name} has no name in files"
        if swaps_mlps and "ffn_" in stored:
            stored = re.sub("ffn_(up|down)", lambda match: f"ffn_{'down' if match[1] == 'up' else 'up'}", stored)
        _add(writer, stored, values + 1 if "soft_emb_norm" in name else values, type_of)


def _mmproj_name(name: str, deepstack: list[int]) -> str:
    for own, stored in MMPROJ_NAMES:
        name = name.replace(own, stored)
    number = re.match(r"v\.deepstack\.(\d+)", name)
    return name if number is None else name.replace(number[0], f"v.deepstack.{deepstack[int(number[1])]}")


def fuse_qkv(stored: Tensors) -> Tensors:
    """Join the queries, keys and values of each layer that has all three, and their biases."""
    joined = dict(stored)
    for name in [name for name in stored if ".attn_q." in name]:
        parts = [name.replace("attn_q", part) for part in ("attn_q", "attn_k", "attn_v")]
        if all(part in stored for part in parts):
            joined[name.replace("attn_q", "attn_qkv")] = torch.cat([joined.pop(part) for part in parts])
    return joined


def f32(_name: str, _shape: tuple[int, ...]) -> Type:
    """Return the one type of float32 files."""
    return Type.F32


def _same(tensors: Tensors, _config: dict[str, Any]) -> Tensors:
    return tensors


def _add(writer: GGUFWriter, name: str, values: Tensor, type_of: TypeOf) -> None:
    is_plain = values.dim() < 2 or any(part in name for part in PLAIN)
    kind = Type.F32 if is_plain else type_of(name, tuple(values.shape))
    data = gguf.quants.quantize(np.ascontiguousarray(values.to(torch.float32).numpy()), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _add_tokenizer(writer: GGUFWriter, folder: Path, pre: str) -> None:
    """Write the vocabulary, the merges and the special tokens of a byte-level BPE."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    ids = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    ids |= {number: token["content"] for number, token in added.items()}
    kinds = {number: CONTROL if token["special"] else USER_DEFINED for number, token in added.items()}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[number] for number in range(len(ids))])
    writer.add_token_types([kinds.get(number, NORMAL) for number in range(len(ids))])
    writer.add_token_merges(merges)
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text()) if path.is_file() else {}
    numbers = {text: number for number, text in ids.items()}
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        token = named.get(f"{name}_token")
        text = token["content"] if isinstance(token, dict) else token
        if text in numbers:
            add(numbers[text])
    frame = (tokenizer.get("post_processor") or {}).get("single", [])
    writer.add_add_bos_token(named.get("add_bos_token", bool(frame) and "SpecialToken" in frame[0]))
    if isinstance(named.get("chat_template"), str):
        writer.add_chat_template(named["chat_template"])
