"""The pooling of a checkpoint, from the files of sentence-transformers or a field of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from quire.errors import CheckpointError, ConfigError, InvalidParameter, UnsupportedFeature, shown
from quire.models.checkpoints.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from quire.models.families.base_models import HEADLESS
from quire.models.specs.encoder_spec import ClassifierHead, EncoderSpec
from quire.models.specs.spec import ModelSpec
from quire.platform.bounded.files import read_json, reason_of
from quire.sequences.pooling import PoolingKind, PoolingParams

_CLASSIFIER = "classifier_from_token"
MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
MAX_LENGTH = 2**31 - 1
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Name of a pooling in a checkpoint -> Quire's name.
POOLINGS: Mapping[str, PoolingKind] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}
# The values of `pooling_type` in a GGUF file; 0 is for none.
GGUF_POOLING: Mapping[str, str] = {"0": "lasttoken", "1": "mean", "2": "cls", "3": "lasttoken", "4": "rank"}


class TextEncoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Convert text to token ids."""


class PoolingConfig(NamedTuple):
    """The pooling of a model's embeddings.

    Args:
        width: number of values of an embedding.
        normalize: True if the checkpoint's embeddings have length 1.
        refusal: reason why the model's embeddings are not supported; None if they are.
        classifier: tokens for "no" and "yes" of a reranker; None for other models.
        has_head: False for a model without an output head, which cannot generate.
        kind: rows of a prompt whose hidden states are pooled.
        prompts: texts that are prepended to an input, by name.
        default_prompt: name of the prompt for inputs that name none; None for no prompt.
        similarity: function from two embeddings to a score; see `quire.engine.scoring`.
        head: head for classification; None for other models.
    """

    width: int
    normalize: bool = True
    refusal: str | None = None
    classifier: tuple[int, int] | None = None
    has_head: bool = True
    kind: PoolingKind = "last"
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt: str | None = None
    similarity: str = "cosine"
    head: ClassifierHead | None = None

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

    def with_prompt(self, inputs: Sequence[Any], name: str | None = None) -> Sequence[Any]:
        """Return inputs with a prompt of the checkpoint prepended to texts.

        Args:
            inputs: texts, and inputs in other forms.
            name: name of the prompt; None for the default one, if there is one.

        Raises:
            InvalidParameter: the checkpoint has no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return inputs
        if name not in self.prompts:
            allowed = (
                f"one of {', '.join(map(repr, self.prompts))}" if self.prompts else "None: the model has no prompts"
            )
            raise InvalidParameter("prompt_name", name, allowed)
        return [self.prompts[name] + item if isinstance(item, str) else item for item in inputs]

    def require_classes(self) -> ClassifierHead:
        """Return the head for classification.

        Raises:
            UnsupportedFeature: there is none.
        """
        if self.head is None:
            raise UnsupportedFeature("classify", "the checkpoint has no head that classifies")
        return self.head


def read_pooling(
    checkpoint: Checkpoint,
    model: ModelSpec | EncoderSpec,
    tokenizer: TextEncoder | None = None,
    classifier: str | None = None,
) -> PoolingConfig:
    """Read the pooling of a checkpoint; by default, the normalised last row of a decoder or first row of an encoder.

    Args:
        checkpoint: the model's files, with `modules.json`, `1_Pooling/config.json` and
            `config_sentence_transformers.json` of sentence-transformers.
        model: the model.
        tokenizer: the model's tokenizer, or None.
        classifier: texts of the tokens for "no" and "yes" of a reranker, with a comma between them.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: a text of `classifier` is not one token.
    """
    stated = _stated_pooling(checkpoint, model)
    if isinstance(model, EncoderSpec):
        refusal = None if model.head is None else "the checkpoint classifies texts, and makes no embeddings of them"
        return stated._replace(has_head=False, head=model.head, refusal=refusal or stated.refusal)
    stated = stated._replace(has_head=HEADLESS not in checkpoint.config)
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


def read_max_length(checkpoint: Checkpoint) -> int | None:
    """Return the longest text of an embedding model, in tokens; None if it is not stated.

    Raises:
        CheckpointError: the file is damaged.
    """
    stated = _read(checkpoint.folder / LENGTH_FILE, dict) or {}
    length = stated.get("max_seq_length")
    if length is not None and (type(length) is not int or not 0 < length <= MAX_LENGTH):
        raise CheckpointError(
            f"{checkpoint.folder / LENGTH_FILE}: max_seq_length must be an integer from 1 to {MAX_LENGTH}, got "
            f"{shown(length)}"
        )
    return length


def _stated_pooling(checkpoint: Checkpoint, model: ModelSpec | EncoderSpec) -> PoolingConfig:
    is_encoder = isinstance(model, EncoderSpec)
    plain = PoolingConfig(model.width, kind="cls" if is_encoder else "last")
    if checkpoint.gguf_fields is not None:
        stated = next((value for name, value in checkpoint.gguf_fields.items() if name.endswith(".pooling_type")), None)
        return plain if stated is None else _with_kind(plain, GGUF_POOLING.get(str(stated), str(stated)), is_encoder)
    modules = _read(checkpoint.folder / MODULES_FILE, list)
    if modules is None:
        return plain
    # The kind of a module is the last part of its class name.
    kinds = {str(module.get("type")).rsplit(".", 1)[-1]: module for module in modules if isinstance(module, dict)}
    stated = _with_prompts(checkpoint, plain._replace(normalize="Normalize" in kinds))
    others = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if others:
        return stated._replace(refusal=f"modules.json has a module {shown(others[0])}, which is not implemented")
    if (_read(checkpoint.folder / LENGTH_FILE, dict) or {}).get("do_lower_case"):
        return stated._replace(refusal=f"{LENGTH_FILE} has do_lower_case, which is not implemented")
    if "Pooling" not in kinds:
        return stated
    kind, has_prompt = _pooling_kind(checkpoint.folder, kinds["Pooling"].get("path"))
    if not has_prompt and stated.prompts:
        return stated._replace(refusal="the checkpoint pools texts without their prompts, which is not implemented")
    return _with_kind(stated, kind, is_encoder)


def _with_kind(stated: PoolingConfig, name: str, is_encoder: bool) -> PoolingConfig:
    """Add the kind of pooling from its name in a checkpoint, or the reason for its refusal."""
    kind = POOLINGS.get(name)
    if kind is not None and (is_encoder or kind != "cls"):
        return stated._replace(kind=kind)
    implemented = "that of the last token, the mean and, of encoders, the first token are implemented"
    return stated._replace(refusal=f"the checkpoint states the pooling {shown(name)}, and only {implemented}")


def _with_prompts(checkpoint: Checkpoint, stated: PoolingConfig) -> PoolingConfig:
    """Add the prompts and the similarity function of `config_sentence_transformers.json`."""
    path = checkpoint.folder / PROMPTS_FILE
    config: dict[str, Any] = _read(path, dict) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must be an object of strings, got {shown(prompts)}")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path}: default_prompt_name must be one of the prompts, got {shown(default)}")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CheckpointError(f"{path}: similarity_fn_name must be one of {SIMILARITIES}, got {shown(similarity)}")
    return stated._replace(prompts=MappingProxyType(prompts), default_prompt=default, similarity=similarity)


def _pooling_kind(folder: Path, path: object) -> tuple[str, bool]:
    """Return the name of the pooling, or several names joined by "+", and whether prompts are pooled too."""
    if not isinstance(path, str) or not path.replace("_", "").isalnum():
        raise CheckpointError(f"{folder / MODULES_FILE} must name a folder for its pooling, got {shown(path)}")
    config: dict[str, Any] | None = _read(folder / path / "config.json", dict)
    if config is None:
        return f"of {path}/config.json, which is missing", True
    has_prompt = config.get("include_prompt", True) is not False
    if config.get("pooling_mode") is not None:
        return str(config["pooling_mode"]), has_prompt
    prefix = "pooling_mode_"
    names = "+".join(name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on)
    return names, has_prompt


def _read(path: Path, kind: type) -> Any:
    """Return the content of a JSON file; None if it does not exist."""
    try:
        value = read_json(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return value
