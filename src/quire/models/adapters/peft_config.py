"""`adapter_config.json` of PEFT: supported, ignored and refused fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, shown
from quire.platform.bounded.patterns import match_names

CONFIG_FILE: Final = "adapter_config.json"
# Fields that change the results of an adapter, and the reason why values other than neutral ones are refused.
REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA scales the weight of the model",
    "lora_bias": "the matrices of an adapter have no biases",
    "modules_to_save": "whole modules of the model cannot be replaced; save the adapter without them",
    "layer_replication": "the layers of the model are not repeated",
    "alora_invocation_tokens": "an adapter is for all tokens of a request",
    "trainable_token_indices": "embeddings take no adapters",
    "use_qalora": "inputs are not pooled in groups",
    "use_bdlora": "matrices are whole, not block-diagonal",
    "arrow_config": "a request has one adapter",
}
# Fields about the training of an adapter, fields that repeat its tensors or say how the model's own weights are stored
# (`fan_in_fan_out`), and fields that `PeftConfig` reads.
IGNORED: Final = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "lora_dropout", "megatron_core", "megatron_config", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
        *("exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha", "target_modules", "bias", "use_rslora", "init_lora_weights"),
        *("rank_pattern", "alpha_pattern", "target_parameters", "fan_in_fan_out"),
    }
)
# Initialisations that keep the weights of the model; others (PiSSA, OLoRA, CorDA, LoftQ) change them.
PLAIN_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
# Value in place of names: all linear layers.
ALL: Final = "all-linear"
_LITERAL = re.compile(r"[A-Za-z0-9_.-]+")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")


class ModuleScale(NamedTuple):
    """Rank and scale of an adapter for a module."""

    rank: int
    scale: float


class PeftConfig:
    """A checked configuration."""

    def __init__(self, values: Mapping[str, Any], path: object) -> None:
        self._values, self._path = values, path
        self._check("peft_type", values.get("peft_type") == "LORA", "LORA")
        for field, why in REFUSED.items():
            if values.get(field) not in (None, False) and values.get(field) not in ([], {}):
                self._refuse(field, why)
        self._check("bias", values.get("bias", "none") == "none", '"none": biases of the model are not replaced')
        init = values.get("init_lora_weights", True)
        is_plain = any(type(init) is type(plain) and init == plain for plain in PLAIN_INITS)
        self._check("init_lora_weights", is_plain, "an initialisation that leaves the weights of the model as they are")
        for field, value in values.items():
            if field not in IGNORED and field not in REFUSED and value not in (None, False) and value not in ([], {}):
                self._refuse(field, "the field is not known, and may change what the adapter computes")
        self._rank = self._whole("r", values.get("r"))
        self._alpha = self._number("lora_alpha", values.get("lora_alpha"))
        self._is_rank_stabilised = values.get("use_rslora", False)
        self._check("use_rslora", isinstance(self._is_rank_stabilised, bool), "true or false")
        self._ranks = self._pattern("rank_pattern", self._whole)
        self._alphas = self._pattern("alpha_pattern", self._number)
        self._parameters = self._read_parameters()
        self._targets = values.get("target_modules")
        if self._targets is None and self._parameters:
            self._targets = []
        is_names = isinstance(self._targets, list) and all(isinstance(name, str) for name in self._targets)
        self._check("target_modules", is_names or isinstance(self._targets, str), "a list of names, or a text")

    @property
    def version(self) -> tuple[int, ...] | None:
        """Version of PEFT that wrote the adapter; None if it is not stated or not a released one."""
        stated = self._values.get("peft_version")
        match = _VERSION.fullmatch(stated) if isinstance(stated, str) else None
        return None if match is None else tuple(int(part or 0) for part in match.groups())

    def scales(self, modules: Sequence[str], parameters: Mapping[str, str] | None = None) -> dict[str, ModuleScale]:
        """Return the rank and scale for each of `modules`, which the adapter has tensors for."""
        targets = self._named(modules, parameters or {})
        names = list(targets.values())
        rank_of = self._reader("rank_pattern", self._ranks, self._rank, names)
        alpha_of = self._reader("alpha_pattern", self._alphas, self._alpha, names)
        return {module: self._scale(rank_of(name), alpha_of(name)) for module, name in targets.items()}

    def _named(self, modules: Sequence[str], parameters: Mapping[str, str]) -> dict[str, str]:
        """Return the name by which PEFT finds the rank of each module: the module's or its parameter's."""
        assert self._targets is not None
        keys_of = self._matcher("target_modules", self._targets, modules)
        targets: dict[str, str] = {}
        for module in modules:
            is_module, parameter = module not in parameters, parameters.get(module, f"{module}.weight")
            if is_module and keys_of(module):
                targets[module] = module
            elif any(ending in self._parameters for ending in _endings(parameter)):
                targets[module] = parameter
            else:
                what = f"module {shown(module)}" if is_module else f"parameter {shown(parameter)}"
                field = "target_modules" if is_module else "target_parameters"
                raise CheckpointError(
                    f"{self._path}: the adapter has tensors for the {what}, which {field} does not name", field=field
                )
        return targets

    def _reader(self, field: str, values: dict[str, Any], default: Any, names: Sequence[str]) -> Callable[[str], Any]:
        """Return a function from a name to the value of the first key that matches it."""
        keys_of = self._matcher(field, values, names)
        order = {key: idx for idx, key in enumerate(values)}

        def value_of(name: str) -> Any:
            first = min(keys_of(name), key=order.__getitem__, default=None)
            return default if first is None else values[first]

        return value_of

    def _read_parameters(self) -> frozenset[str]:
        names = self._values.get("target_parameters") or []
        is_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        self._check("target_parameters", is_names, "a list of names")
        return frozenset(names)

    def _scale(self, rank: int, alpha: float) -> ModuleScale:
        return ModuleScale(rank, alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank))

    def _matcher(self, field: str, keys: str | Collection[str], names: Sequence[str]) -> Callable[[str], list[str]]:
        """Return a function from one of `names` to the keys that match it: endings of the name, or patterns.

        A string in place of keys is a pattern of the whole name, or "all-linear".
        """
        if isinstance(keys, str):
            patterns = {} if keys == ALL else {keys: rf"(?:{keys})\Z"}
        else:
            patterns = {key: rf"(?:.*\.)?(?:{key})\Z" for key in keys if not _LITERAL.fullmatch(key)}
        try:
            matches = match_names(patterns.values(), names)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {field}: {error}", field=field) from error
        # A set, since an adapter for experts may have many thousands of keys.
        literals = frozenset() if isinstance(keys, str) else frozenset(keys) - patterns.keys()

        def keys_of(name: str) -> list[str]:
            pattern_keys = [key for key, pattern in patterns.items() if name in matches[pattern]]
            return [ALL] if keys == ALL else pattern_keys + [ending for ending in _endings(name) if ending in literals]

        return keys_of

    def _pattern(self, field: str, read: Callable[[str, Any], Any]) -> dict[str, Any]:
        value = self._values.get(field) or {}
        self._check(field, isinstance(value, dict), "an object of numbers by module")
        return {key: read(f"{field}.{key}", number) for key, number in value.items()}

    def _whole(self, field: str, value: object) -> int:
        self._check(field, type(value) is int and 0 < value < 1 << 16, "a positive integer", value)
        assert isinstance(value, int)
        return value

    def _number(self, field: str, value: object) -> float:
        is_number = type(value) in (int, float) and 0 < abs(value) < 1e6  # type: ignore[arg-type]
        self._check(field, is_number, "a number other than 0, below a million", value)
        return float(value)  # type: ignore[arg-type]

    def _check(self, field: str, is_good: bool, allowed: str, value: object = None) -> None:
        if not is_good:
            actual = self._values.get(field) if value is None else value
            raise CheckpointError(f"{self._path}: {shown(field)} must be {allowed}, got {shown(actual)}", field=field)

    def _refuse(self, field: str, why: str) -> None:
        raise CheckpointError(
            f"{self._path}: {shown(field)} is not supported, got {shown(self._values[field])}: {why}", field=field
        )


def _endings(name: str) -> Iterator[str]:
    """Yield a dotted name, then its part after each dot."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name
