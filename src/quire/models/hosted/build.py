"""Construction of transformers' modules: parameters without memory, all other tensors as the modules compute them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.errors import CheckpointError, ConfigError, UnsupportedModel, describe, shown
from quire.models.hosted.interface import NAME, register
from quire.models.specs.hosted_spec import Hindrance

# Factories of tensors without values, which a checkpoint fills, and of tensors with values.
_UNINITIALISED: Final = frozenset((torch.empty, torch.empty_strided))
_FILLED: Final = frozenset((torch.zeros, torch.ones, torch.rand, torch.randn, torch.full))
# Elements from which a tensor of floats that is made with values is taken for a weight.
WEIGHT_SIZE: Final = 1 << 20
# Elements of a tensor that is no weight, at most: the position tables of models with learned or fixed positions.
MAX_TABLE: Final = 1 << 28
# Numbers of a range, at most: positions, or dimensions of a rotation.
MAX_RANGE: Final = 1 << 24
# Construction sets the default dtype and replaces functions of transformers, both for the whole process.
_LOCK: Final = threading.Lock()
# Last words of fields that give numbers of modules, and the largest numbers.
COUNTS: Final = {"layers": 1024, "layer": 1024, "blocks": 1024, "loops": 1024, "experts": 1 << 16}
# The largest size that a field may have.
MAX_SIZE: Final = 1 << 31


def hindered(hindrance: Hindrance, architecture: str, reason: str) -> UnsupportedModel:
    """Return the error of an architecture that cannot run over paged memory."""
    return UnsupportedModel(
        f"the architecture {shown(architecture)} is not implemented, and transformers' modules of it cannot run over "
        f"paged memory ({hindrance}): {reason}",
        field="architectures",
    )


class _WeightsOnMeta(TorchFunctionMode):
    """Creates tensors that become weights on the meta device, where they take no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _UNINITIALISED:
            options["device"] = "meta"
        elif func in _FILLED:
            on_meta = func(*args, **{**options, "device": "meta"})
            if on_meta.is_floating_point() and on_meta.numel() >= WEIGHT_SIZE:
                return on_meta
            if on_meta.numel() > MAX_TABLE:
                raise ValueError(f"a table of shape {list(on_meta.shape)} is made, which is too large")
        elif func is torch.arange and func(*args, **{**options, "device": "meta"}).numel() > MAX_RANGE:
            raise ValueError(f"a range of more than {MAX_RANGE:,} numbers is made")
        return func(*args, **options)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first of a configuration's architectures."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json lacks the field architectures", field="architectures")
    return names[0]


def library_name() -> str:
    """Return the name of transformers with its version."""
    import transformers

    return f"transformers {transformers.__version__}"


def make_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a causal language model.

    Raises:
        UnsupportedModel: transformers has no causal language model of this architecture.
        CheckpointError: a size is absurd, or transformers refuses the configuration.
    """
    import transformers

    architecture, model_type = architecture_of(config), config.get("model_type")
    check_numbers(config)
    library = library_name()
    configs: Any = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in configs:
        own = "; it comes with code of its own, which is never run" if "auto_map" in config else ""
        raise UnsupportedModel(
            f"the architecture {shown(architecture)} is not implemented, and {library} does not know the model_type "
            f"{shown(model_type)} either{own}",
            field="architectures",
        )
    try:
        fields = {key: _decoded(value) for key, value in config.items() if key != "auto_map"}
        made = configs[model_type].from_dict(fields)
    except Exception as error:
        raise CheckpointError(f"config.json: transformers refuses it: {first_line(error)}") from error
    found = _class_of(made, architecture)
    if found is None:
        raise hindered("encoder", architecture, f"{library} has no causal language model of model_type {model_type!r}")
    if found.__name__ != architecture:
        reason = f"the causal language model of model_type {model_type!r} is {found.__name__}"
        raise hindered("encoder", architecture, reason)
    return made


def _class_of(made: Any, architecture: str) -> Any:
    """Return transformers' causal language model of a configuration; None if it has none.

    Where a model type is of text and images, its causal language model may take the configuration of the text alone.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(made) in models:
        return models[type(made)]
    names: Mapping[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    of_name = (models[CONFIG_MAPPING[model_type]] for model_type, name in names.items() if name == architecture)
    return next((found for found in of_name if found.config_class is type(made)), None)


def _decoded(value: Any) -> Any:
    """Return a value of a configuration with the floats that JSON lacks, which transformers stores as objects."""
    if isinstance(value, Mapping):
        named = value.get("__float__")
        return float(named) if isinstance(named, str) else {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def check_numbers(config: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a configuration with a size or a number of layers that no model has, before anything is made of it."""
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            check_numbers(value, f"{path}.")
            continue
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, bool) or not isinstance(size, int):
            continue
        most = COUNTS.get(str(name).rpartition("_")[2], MAX_SIZE)
        if size > most:
            raise CheckpointError(f"config.json: {path} is {shown(size)}, and at most {most:,} is read", field=name)


def build_module(
    config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, experts: str | None = None
) -> nn.Module:
    """Build the causal language model of a configuration.

    Args:
        config: content of `config.json`, without its quantisation.
        dtype: dtype of weights, and of what modules compute without naming one.
        experts: name of the function of experts in transformers' registry; None for their own loop.

    Returns:
        The module, whose parameters are on the meta device; buffers are on the CPU, with their values.

    Raises:
        UnsupportedModel, CheckpointError: see `make_config`.
    """
    module = _construct(make_config(config), config, dtype, experts)
    put_on_meta(module)
    if dtype != torch.float32:
        # Tables of positions are computed in float32 and rounded once, as transformers does when it loads a model.
        precise = _construct(make_config(config), config, torch.float32, experts)
        for name, table in precise.named_buffers():
            rounded = module.get_buffer(name)
            if rounded.is_floating_point() and rounded.device == table.device:
                rounded.copy_(table)
    return module.eval()


def _construct(made: Any, config: Mapping[str, Any], dtype: torch.dtype, experts: str | None) -> nn.Module:
    """Construct a module under a default dtype."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register()
    try:
        is_listed = type(made) in MODEL_FOR_CAUSAL_LM_MAPPING
        make = AutoModelForCausalLM.from_config if is_listed else _class_of(made, architecture_of(config))._from_config
        with _LOCK, no_init_weights(), _WeightsOnMeta():
            module: nn.Module = make(
                made, dtype=dtype, attn_implementation=NAME, experts_implementation=experts or "eager"
            )
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # of a table of the classes of attention
            raise hindered("attention", architecture_of(config), "its attention has no interface") from error
        raise CheckpointError(
            f"config.json: transformers cannot build {architecture_of(config)}: {first_line(error)}"
        ) from error
    return module


def put_on_meta(module: nn.Module) -> None:
    """Put all parameters on the meta device; tied ones stay tied."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                part._parameters[name] = moved[parameter]


def first_line(error: BaseException) -> str:
    """Return the type and the first sentence of the message of an exception of transformers, on one line.

    A line that ends with a colon goes on with the next one.
    """
    lines = [line.strip() for line in describe(error).strip().split("\n")]
    count = next((idx for idx, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1) + 1
    return " ".join(lines[:count])[:300]
