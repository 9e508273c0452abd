"""`adapter_config.json` of PEFT: what is read of it, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quire.bounded.patterns import match_names
from quire.errors import CheckpointError, shown

CONFIG_FILE: Final = "adapter_config.json"
# Fields that change what an adapter computes, and the reason why other values than those that change nothing are
# refused.
REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA scales the weight of the model",
    "lora_bias": "the matrices of an adapter have no biases",
    "modules_to_save": "whole modules of the model cannot be replaced; save the adapter without them",
    "layer_replication": "the layers of the model are not repeated",
    "alora_invocation_tokens": "an adapter is for all tokens of a request",
    "trainable_token_indices": "embeddings take no adapters",
    "target_parameters": "adapters are for linear layers, not for parameters such as stacked experts",
    "fan_in_fan_out": "weights are stored [out, in]",
    "use_qalora": "inputs are not pooled in groups",
    "use_bdlora": "matrices are whole, not block-diagonal",
    "arrow_config": "a request has one adapter",
}
# Fields that tell how an adapter was made, or repeat what its tensors say.
IGNORED: Final = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "lora_dropout", "megatron_core", "megatron_config", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
        *("exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha", "target_modules", "bias", "use_rslora", "init_lora_weights"),
        *("rank_pattern", "alpha_pattern"),
    }
)
# Initial values that leave the weights of the model as they are; others (PiSSA, OLoRA, CorDA, LoftQ) change them.
PLAIN_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
_LITERAL = re.compile(r"[A-Za-z0-9_.-]+")


class ModuleScale(NamedTuple):
    """Rank and scale of an adapter in a module."""

    rank: int
    scale: float


class PeftConfig:
    """A configuration that was checked.

    Args:
        values: content of the file.
        place: path of the file, for messages.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or asks for something that is not implemented.
    """

    def __init__(self, values: Mapping[str, Any], place: object) -> None:
        self._values, self._place = values, place
        self._check("peft_type", values.get("peft_type") == "LORA", "LORA")
        for field, why in REFUSED.items():
            if values.get(field) not in (None, False) and values.get(field) not in ([], {}):
                self._refuse(field, why)
        self._check("bias", values.get("bias", "none") == "none", '"none": biases of the model are not replaced')
        init = values.get("init_lora_weights", True)
        is_plain = any(type(init) is type(each) and init == each for each in PLAIN_INITS)
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
        self._targets = values.get("target_modules")
        is_names = isinstance(self._targets, list) and all(isinstance(each, str) for each in self._targets)
        self._check("target_modules", is_names or isinstance(self._targets, str), "a list of names, or a text")

    def scales(self, modules: Sequence[str]) -> dict[str, ModuleScale]:
        """Return rank and scale in each of the modules that the adapter has tensors for.

        Raises:
            CheckpointError: a module is not among `target_modules`, or a pattern cannot be matched.
        """
        is_target = self._matcher("target_modules", modules)
        for module in modules:
            if not is_target(self._targets, module):
                raise CheckpointError(
                    f"{self._place}: the adapter has tensors for the module {shown(module)}, which target_modules does "
                    "not name",
                    field="target_modules",
                )
        ranks, alphas = (self._matcher(name, modules) for name in ("rank_pattern", "alpha_pattern"))
        return {
            module: self._scale(
                next((rank for key, rank in self._ranks.items() if ranks(key, module)), self._rank),
                next((alpha for key, alpha in self._alphas.items() if alphas(key, module)), self._alpha),
            )
            for module in modules
        }

    def _scale(self, rank: int, alpha: float) -> ModuleScale:
        return ModuleScale(rank, alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank))

    def _matcher(self, field: str, modules: Sequence[str]) -> Callable[[Any, str], bool]:
        """Return a function that says whether a key, or a list of them, names a module: its last parts, or by pattern.

        A text of `target_modules` is a pattern of the whole name.
        """
        value = self._values.get(field)
        if field == "target_modules" and isinstance(value, str):
            patterns = {} if value == "all-linear" else {value: rf"(?:{value})\Z"}
        else:
            patterns = {key: rf"(?:.*\.)?(?:{key})\Z" for key in value or () if not _LITERAL.fullmatch(key)}
        try:
            matches = match_names(patterns.values(), modules)
        except ValueError as error:
            raise CheckpointError(f"{self._place}: {field}: {error}", field=field) from error

        def is_named(key: Any, module: str) -> bool:
            if isinstance(key, list):
                return any(is_named(each, module) for each in key)
            if key in patterns:
                return module in matches[patterns[key]]
            return key == "all-linear" or module == key or module.endswith(f".{key}")

        return is_named

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
            found = self._values.get(field) if value is None else value
            raise CheckpointError(f"{self._place}: {shown(field)} must be {allowed}, got {shown(found)}", field=field)

    def _refuse(self, field: str, why: str) -> None:
        raise CheckpointError(
            f"{self._place}: {shown(field)} is not supported, got {shown(self._values[field])}: {why}", field=field
        )
