"""The files of a model's vision encoder: the model's own files, or for a GGUF file another file, its `mmproj`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from quire.errors import CheckpointError, ConfigError, UnsupportedModel, shown
from quire.models.checkpoints.checkpoint import GGUF_SUFFIX, Checkpoint, is_mmproj
from quire.models.families import build
from quire.models.families.vision_towers import TOWERS, is_of_vision
from quire.platform.bounded.files import user_path

# Types of weights in names of files, the preferred first: 16 bits lose nothing that counts, and 32 take twice as many.
TYPES: Final = ("bf16", "f16", "f32", "q8_0")
_TYPE: Final = re.compile(rf"(?<![a-z0-9])({'|'.join(TYPES)})(?![a-z0-9])", re.IGNORECASE)


def has_vision(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has a vision encoder of a family; copies of language models have none."""
    return any(is_of_vision(checkpoint.config, name) for name in checkpoint.tensors)


def find_vision(checkpoint: Checkpoint, mmproj: str | None = None) -> Checkpoint | None:
    """Return the files of a model's vision encoder as a checkpoint; None without one.

    Args:
        checkpoint: the model.
        mmproj: GGUF file of the encoder; None takes the one beside a model's GGUF file.

    Raises:
        ConfigError: `mmproj` is given for a model of a folder.
        CheckpointError: the file is missing or damaged, does not fit the language model, or one of several would have
            to be chosen.
        UnsupportedModel: the model or the encoder is not implemented.
    """
    model = checkpoint.gguf_path
    if model is None:
        if mmproj is not None:
            raise ConfigError(
                f"mmproj is {shown(mmproj)}, but it is for models of GGUF files: {checkpoint.folder} has its own "
                "encoder, or none",
                field="mmproj",
            )
        return checkpoint if has_vision(checkpoint) else None
    path = user_path(mmproj) if mmproj is not None else find_mmproj(model)
    return None if path is None else _open(path, checkpoint)


def find_mmproj(model: Path) -> Path | None:
    """Return the file of the vision encoder in the folder of a model's GGUF file; None without one.

    Raises:
        CheckpointError: there are several, and none is preferred.
    """
    files = sorted(file for file in model.parent.glob(f"*{GGUF_SUFFIX}") if is_mmproj(file) and file != model)
    best = _preferred(files)
    if len(best) > 1:
        names = ", ".join(file.name for file in best[:8])
        raise CheckpointError(f"one vision encoder is needed beside {model}, found {names}: name it", field="mmproj")
    return best[0] if best else None


def _preferred(files: Sequence[Path]) -> list[Path]:
    """Return the files with the preferred type of those with one in their names; all if none has one."""
    types = {file: match[1].lower() for file in files if (match := _TYPE.search(file.name))}
    best = min(types.values(), key=TYPES.index, default=None)
    return [file for file in files if best is None or types.get(file) == best]


def _open(path: Path, model: Checkpoint) -> Checkpoint:
    """Open the file of an encoder, and check that it belongs to a language model."""
    from quire.models.gguf.mmproj import open_mmproj  # imports torch

    if not path.is_file():
        raise CheckpointError(f"mmproj {path} does not exist: name a {GGUF_SUFFIX} file", field="mmproj")
    found = open_mmproj(path)
    architecture = model.config["architectures"][0]
    tower = TOWERS.get(architecture)
    if tower is None or tower.read is not found.read:
        fitting = {name: each.token for name, each in TOWERS.items() if each.read is found.read}
        raise UnsupportedModel(
            f"{path}: it is the encoder of a {', '.join(fitting)}, with {next(iter(fitting.values()))} in the "
            f"vocabulary, and {model.gguf_path} is a {architecture}",
            field="mmproj",
        )
    spec = build(model.config)[0]
    for name, theirs, ours in (
        ("clip.vision.projection_dim", found.out_width, spec.width),
        ("number of clip.vision.is_deepstack_layers", found.num_deepstack, spec.image_rows.num_deepstack),
    ):
        if theirs != ours:
            raise CheckpointError(f"{path}: the {name} must be {ours} as for {model.gguf_path}, got {theirs}")
    if tower.token_field not in model.config:
        raise CheckpointError(f"{model.gguf_path}: the vocabulary has no token of images, {tower.token}")
    return replace(
        model,
        folder=path.parent,
        config={**model.config, **found.config},
        tensors=found.tensors,
        gguf_fields=found.fields,
        divided={},
        gguf_path=path,
        image_settings=found.image_settings,
    )
