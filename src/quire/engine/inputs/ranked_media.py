"""Media of prompts on the ranks that share a model: rank 0 sends embeddings with requests, and features of images.

```
 ["add", {..., "media": [[SPAN, ["tensor", DTYPE, SHAPE, BASE64], GRID, SEES_ITSELF], ...]}]   embeddings from Python
 ["add", {..., "media": [[SPAN, ["image", DIGEST, ROWS, COLUMNS, BYTES], GRID, SEES_ITSELF], ...]}]
 ["features", DIGEST, DTYPE, SHAPE, BASE64]     as soon as rank 0's encoder has made them
```

So images are encoded once, and every rank has the same features in memory when it plans: the plans follow from that.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import torch
from torch import Tensor

from quire.distributed.kvstore.record import bytes_of
from quire.models.modules.vision_encoder import ImagePatches

_TENSOR: Final = "tensor"
_IMAGE: Final = "image"


def pack(embeddings: object) -> list[Any]:
    """Return the embeddings of a medium, or the name of an image, as a JSON value."""
    if isinstance(embeddings, ImagePatches):
        return [_IMAGE, embeddings.digest.hex(), embeddings.rows, embeddings.columns, embeddings.num_bytes]
    assert isinstance(embeddings, Tensor)
    return [_TENSOR, *tensor_to_json(embeddings)]


def unpack(value: list[Any]) -> object:
    """Return what `pack` encoded; an image has no values."""
    kind, *fields = value
    if kind == _TENSOR:
        return tensor_from_json(*fields)
    digest, *sizes = fields
    return ImagePatches(bytes.fromhex(digest), torch.empty(0), *sizes)


def tensor_to_json(tensor: Tensor) -> list[Any]:
    """Return a tensor's dtype, shape and bytes as a JSON value."""
    whole = tensor.detach().cpu().contiguous()
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), base64.b64encode(bytes_of(whole)).decode()]


def tensor_from_json(dtype: str, shape: list[int], content: str) -> Tensor:
    """Return the tensor that `tensor_to_json` encoded."""
    values = torch.empty(shape, dtype=getattr(torch, dtype))
    bytes_of(values)[:] = base64.b64decode(content)
    return values
