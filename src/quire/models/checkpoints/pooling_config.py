"""The pooling of a checkpoint, from the files of sentence-transformers or a field of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from quire.errors import CheckpointError, ConfigError, InvalidParameter, UnsupportedFeature, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.sentence_modules import module_path, read_file, read_modules, refusal_of
from quire.models.families.base_models import HEADLESS
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.pooled_spec import ClassifierHead
from quire.models.specs.spec import ModelSpec
from quire.sequences.pooling import Pooling, PoolingKind, PoolingParams, PromptedText, Role

_CLASSIFIER = "classifier_from_token"
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
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
    "weightedmean_tokens": "weightedmean",
}
# Names of prompts for a query and for a document; of several, the first that a checkpoint has, as in
# sentence-transformers.
ROLES: Mapping[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
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
        pools_prompts: True if the tokens of prompts are pooled too.
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
    pools_prompts: bool = True
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

    @property
    def pooling(self) -> Pooling:
        """The result of a request for an embedding."""
        return Pooling(kind=self.kind)

    def with_prompt(
        self, inputs: Sequence[Any], name: str | None = None, *, role: Role | None = None, field: str = "prompt_name"
    ) -> Sequence[Any]:
        """Return inputs with a prompt of the checkpoint in front of texts.

        Args:
            inputs: texts, and inputs in other forms, which are left as they are.
            name: name of the prompt; None for that of `role`, or the default one, if there is one.
            role: part of the texts in a search; None for none. A checkpoint with a prompt for one role only has none
                for the other.
            field: name of the field with `name`, for errors.

        Raises:
            InvalidParameter: the checkpoint has no prompt of this name.
        """
        prompt = self._prompt(name, role, field)
        if not prompt:
            return inputs
        join = prompt.__add__ if self.pools_prompts else partial(PromptedText, prompt)
        return [join(item) if isinstance(item, str) else item for item in inputs]

    def _prompt(self, name: str | None, role: Role | None, field: str) -> str:
        """Return the text of a prompt; "" for none."""
        prompts = self.prompts
        if name is not None:
            if name not in prompts:
                allowed = f"one of {', '.join(map(repr, prompts))}" if prompts else "None: the model has no prompts"
                raise InvalidParameter(field, name, allowed)
            return prompts[name]
        if role is not None:
            own = [each for each in ROLES[role] if each in prompts]
            if own or any(each in prompts for names in ROLES.values() for each in names):
                return prompts[own[0]] if own else ""
        return "" if self.default_prompt is None else prompts[self.default_prompt]

    def require_classes(self, *, of_tokens: bool | None = None) -> ClassifierHead:
        """Return the head for classification.

        Args:
            of_tokens: True for one that classifies tokens, False for one that classifies texts, None for either.

        Raises:
            UnsupportedFeature: there is none.
        """
        if self.head is None:
            raise UnsupportedFeature("classify", "the checkpoint has no head that classifies")
        if of_tokens is not None and of_tokens != (self.head.pooling == "tokens"):
            what = "texts, not tokens: use classify" if of_tokens else "tokens, not texts: use classify_tokens"
            raise UnsupportedFeature("classify_tokens" if of_tokens else "classify", f"the model classifies {what}")
        return self.head


def read_pooling(
    checkpoint: Checkpoint,
    model: ModelSpec | HostedSpec | EncoderSpec,
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
    if model.classifier is not None:
        refusal = "the checkpoint classifies texts, and makes no embeddings of them"
        stated = stated._replace(head=model.classifier, refusal=refusal, pools_prompts=True)
    has_head = not isinstance(model, EncoderSpec) and model.classifier is None and HEADLESS not in checkpoint.config
    stated = stated._replace(has_head=has_head)
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
    stated = read_file(checkpoint.folder / LENGTH_FILE, dict) or {}
    length = stated.get("max_seq_length")
    if length is not None and (type(length) is not int or not 0 < length <= MAX_LENGTH):
        raise CheckpointError(
            f"{checkpoint.folder / LENGTH_FILE}: max_seq_length must be an integer from 1 to {MAX_LENGTH}, got "
            f"{shown(length)}"
        )
    return length


def _stated_pooling(checkpoint: Checkpoint, model: ModelSpec | HostedSpec | EncoderSpec) -> PoolingConfig:
    is_encoder = isinstance(model, EncoderSpec)
    width = model.dense[-1].width if model.dense else model.width
    plain = PoolingConfig(width, kind="cls" if is_encoder else "last")
    if checkpoint.gguf_fields is not None:
        stated = next((value for name, value in checkpoint.gguf_fields.items() if name.endswith(".pooling_type")), None)
        return plain if stated is None else _with_kind(plain, GGUF_POOLING.get(str(stated), str(stated)), is_encoder)
    folder = checkpoint.folder
    modules = read_modules(folder)
    if modules is None:
        return _with_prompts(checkpoint, plain)
    stated = _with_prompts(checkpoint, plain._replace(normalize=any(each.kind == "Normalize" for each in modules)))
    refusal = refusal_of(folder, modules)
    if refusal is not None:
        return stated._replace(refusal=refusal)
    if (read_file(folder / LENGTH_FILE, dict) or {}).get("do_lower_case"):
        return stated._replace(refusal=f"{LENGTH_FILE} has do_lower_case, which is not implemented")
    path = next((each.path for each in modules if each.kind == "Pooling"), None)
    if path is None:
        return stated
    kind, pools_prompts = _pooling_kind(folder, module_path(folder, path))
    return _with_kind(stated._replace(pools_prompts=pools_prompts), kind, is_encoder)


def _with_kind(stated: PoolingConfig, name: str, is_encoder: bool) -> PoolingConfig:
    """Add the kind of pooling from its name in a checkpoint, or the reason for its refusal."""
    kind = POOLINGS.get(name)
    if kind is not None and (is_encoder or kind != "cls"):
        return stated._replace(kind=kind)
    names = [each for each in dict.fromkeys(POOLINGS.values()) if is_encoder or each != "cls"]
    implemented = f"implemented are {', '.join(names)}"
    return stated._replace(refusal=f"the checkpoint states the pooling {shown(name)}, and {implemented}")


def _with_prompts(checkpoint: Checkpoint, stated: PoolingConfig) -> PoolingConfig:
    """Add the prompts and the similarity function of `config_sentence_transformers.json`."""
    path = checkpoint.folder / PROMPTS_FILE
    config: dict[str, Any] = read_file(path, dict) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must be an object of strings, got {shown(prompts)}")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path}: default_prompt_name must be one of the prompts, got {shown(default)}")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CheckpointError(f"{path}: similarity_fn_name must be one of {SIMILARITIES}, got {shown(similarity)}")
    return stated._replace(prompts=MappingProxyType(prompts), default_prompt=default, similarity=similarity)


def _pooling_kind(folder: Path, path: str) -> tuple[str, bool]:
    """Return the name of the pooling, or several names joined by "+", and whether prompts are pooled too."""
    config: dict[str, Any] | None = read_file(folder / path / "config.json", dict)
    if config is None:
        return f"of {path}/config.json, which is missing", True
    has_prompt = config.get("include_prompt", True) is not False
    mode = config.get("pooling_mode")
    if mode is not None:
        return "+".join(map(str, mode)) if isinstance(mode, list) else str(mode), has_prompt
    prefix = "pooling_mode_"
    names = "+".join(name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on)
    return names or "mean", has_prompt
