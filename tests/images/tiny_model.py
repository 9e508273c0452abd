"""A tiny random Qwen3-VL with a tokenizer and a chat template, which are written for tests."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

from tests.server.checkpoint import tokenizer_library

START, PAD, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
MARKS = (START, PAD, END, VIDEO, "<|tool|>")
TEMPLATE = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ write(message.content) }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
    "deepstack_visual_indexes": [0, 1],
}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 256, "longest_edge": 1 << 20},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def save(folder: Path) -> Path:
    """Write the model, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    library = tokenizer_library()
    library.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    ids = library.get_vocab()
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": library.get_vocab_size(), "pad_token_id": 0},
        vision_config=VISION,
        image_token_id=ids[PAD],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
    )
    torch.manual_seed(3)
    transformers.Qwen3VLForConditionalGeneration(config).eval().save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


GEMMA_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
GEMMA_TEMPLATE = TEMPLATE.replace(f"{START}{PAD}{END}", GEMMA_MARKS[0])
GEMMA_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 32,
    "initializer_range": 0.2,
    "vision_use_head": False,
}
GEMMA_SETTINGS: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def random_gemma(seed: int, **config: Any) -> Any:
    """Return a random Gemma 3 of transformers, whose projector would be zeros, and images nothing."""
    torch.manual_seed(seed)
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**config)).eval()
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        projector.mm_input_projection_weight.normal_(std=0.2)
        projector.mm_soft_emb_norm.weight.normal_(std=0.2)
    return model


def save_gemma(folder: Path) -> Path:
    """Write a tiny Gemma 3 with images of 16 tokens, and return its folder."""
    library = tokenizer_library()
    library.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in (*GEMMA_MARKS, "<|tool|>")])
    start, soft, end = (library.token_to_id(mark) for mark in GEMMA_MARKS)
    parts: dict[str, Any] = {
        "text_config": GEMMA_TEXT | {"vocab_size": library.get_vocab_size(), "pad_token_id": 0},
        "vision_config": GEMMA_VISION,
        "boi_token_index": start,
        "image_token_index": soft,
        "eoi_token_index": end,
    }
    random_gemma(3, mm_tokens_per_image=16, **parts).save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": GEMMA_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(GEMMA_SETTINGS))
    return folder


def picture(width: int, height: int, seed: int, form: str = "PNG") -> bytes:
    """Return a file with noise."""
    noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = BytesIO()
    Image.frombytes("RGB", (width, height), noise.numpy().tobytes()).save(file, form)
    return file.getvalue()


def in_base64(file: bytes) -> str:
    """Return a file in base64."""
    return base64.b64encode(file).decode()


def data_url(file: bytes) -> str:
    """Return a file as a URL."""
    return f"data:image/png;base64,{in_base64(file)}"


def url_part(file: bytes, **fields: object) -> dict[str, Any]:
    """Return the part of a message of a chat."""
    return {"type": "image_url", "image_url": {"url": data_url(file), **fields}}
