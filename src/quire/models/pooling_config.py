"""The pooling that a checkpoint states: the files of sentence-transformers, or a field of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.bounded.files import read_json
from quire.errors import CheckpointError, ConfigError, InvalidParameter, UnsupportedFeature, shown
from quire.models.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from quire.models.families.base_models import HEADLESS
from quire.sequences.pooling import PoolingParams

_CLASSIFIER = "classifier_from_token"
MODULES_FILE = "modules.json"
LAST_TOKEN = "lasttoken"
# The values of `pooling_type` in a GGUF file; 0 states none.
GGUF_POOLING: Mapping[str, str] = {"0": LAST_TOKEN, "1": "mean", "2": "cls", "3": LAST_TOKEN, "4": "rank"}


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Convert text to token ids."""


class PoolingConfig(NamedTuple):
    """The pooling of a model's embeddings.

    Args:
        width: number of values of an embedding.
        normalize: True where the checkpoint's embeddings have length 1.
        refusal: reason why the model's embeddings are not supported; None where they are.
        classifier: tokens for "no" and "yes" of a reranker; None for other models.
        has_head: False for a checkpoint without an output head, which cannot generate.
    """

    width: int
    normalize: bool = True
    refusal: str | None = None
    classifier: tuple[int, int] | None = None
    has_head: bool = True

    def check(self, params: PoolingParams) -> None:
        """Check that embeddings can be made with these parameters.

        Raises:
            InvalidParameter: there are more `dimensions` than the model has.
            UnsupportedFeature: the checkpoint states a pooling that is not implemented.
        """
        if type(params) is not PoolingParams:
            raise InvalidParameter("pooling_params", params, "PoolingParams")
        if self.refusal is not None:
            raise UnsupportedFeature("embeddings", self.refusal)
        if params.dimensions is not None and params.dimensions > self.width:
            raise InvalidParameter("dimensions", params.dimensions, f"at most the width of the model ({self.width})")


def read_pooling(
    checkpoint: Checkpoint, width: int, tokenizer: Encoder | None = None, classifier: str | None = None
) -> PoolingConfig:
    """Read the pooling of a checkpoint; without any statement it is the last token's, normalised.

    Args:
        checkpoint: the model's files; of sentence-transformers, `modules.json` and `1_Pooling/config.json`.
        width: E.
        tokenizer: None where there is none.
        classifier: texts of the tokens for "no" and "yes" of a reranker, with a comma between them.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: a text of `classifier` is not one token.
    """
    stated = _stated_pooling(checkpoint, width)._replace(has_head=HEADLESS not in checkpoint.config)
    if classifier is None:
        return stated
    if not stated.has_head:
        raise ConfigError("classifier_from_token needs an output head, which this checkpoint lacks", field=_CLASSIFIER)
    if tokenizer is None:
        raise ConfigError("classifier_from_token needs a tokenizer", field=_CLASSIFIER)
    no, yes = (tokenizer.encode(text, add_special_tokens=False) for text in classifier.split(","))
    if len(no) != 1 or len(yes) != 1 or no == yes:
        numbers = f"{len(no)} and {len(yes)} tokens"
        raise ConfigError(
            f"classifier_from_token must name two tokens of the model, got {shown(classifier)}: {numbers}",
            field=_CLASSIFIER,
        )
    return stated._replace(classifier=(no[0], yes[0]))


def _stated_pooling(checkpoint: Checkpoint, width: int) -> PoolingConfig:
    if checkpoint.gguf_fields is not None:
        stated = next((value for name, value in checkpoint.gguf_fields.items() if name.endswith(".pooling_type")), None)
        kind = LAST_TOKEN if stated is None else GGUF_POOLING.get(str(stated), str(stated))
        return PoolingConfig(width, refusal=_refusal_of(kind))
    modules = _read(checkpoint.folder / MODULES_FILE, list)
    if modules is None:
        return PoolingConfig(width)
    # The kind of a module is the last part of its class's name.
    kinds = {str(each.get("type")).rsplit(".", 1)[-1]: each for each in modules if isinstance(each, dict)}
    others = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    refusal = f"modules.json has a module {shown(others[0])}, which is not implemented" if others else None
    if "Pooling" in kinds:
        refusal = refusal or _refusal_of(_pooling_kind(checkpoint.folder, kinds["Pooling"].get("path")))
    return PoolingConfig(width, normalize="Normalize" in kinds, refusal=refusal)


def _refusal_of(kind: str) -> str | None:
    if kind == LAST_TOKEN:
        return None
    return f"the checkpoint states the pooling {shown(kind)}, and only that of the last token is implemented"


def _pooling_kind(folder: Path, path: object) -> str:
    """Return the name of the pooling, several names joined, as the config of the module at `path` states it."""
    if not isinstance(path, str) or not path.replace("_", "").isalnum():
        raise CheckpointError(f"{folder / MODULES_FILE} must name a folder for its pooling, got {shown(path)}")
    config: dict[str, Any] | None = _read(folder / path / "config.json", dict)
    if config is None:
        return f"of {path}/config.json, which is missing"
    if config.get("pooling_mode") is not None:
        return str(config["pooling_mode"])
    prefix = "pooling_mode_"
    return "+".join(name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on)


def _read(path: Path, kind: type) -> Any:
    """Return the content of a JSON file, None where there is none."""
    try:
        value = read_json(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return value
