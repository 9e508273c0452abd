"""The dtypes that weights may have, by their names in options and in safetensors files."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
