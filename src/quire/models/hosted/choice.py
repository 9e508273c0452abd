"""The choice between a family and transformers' modules for a decoder; needs torch only for the latter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire.config.extras import EXTRAS, check_extra, importing_extra, is_installed
from quire.errors import ConfigError, UnsupportedModel, shown
from quire.models.families import build, find_family
from quire.models.families.dense_layers import DENSE
from quire.models.families.encoders import build_encoder, find_encoder
from quire.models.families.quantization_config import without_quantization
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import ModelSpec, WeightMap

# Option that states the choice.
OPTION: Final = "model_impl"


class ReadDecoder(NamedTuple):
    """A decoder's configuration, read.

    Args:
        spec: the model.
        weight_map: names of a family's weights; empty for transformers' modules, which have their own names.
    """

    spec: ModelSpec | HostedSpec
    weight_map: WeightMap


def read_decoder(config: Mapping[str, Any], model_impl: str = "auto") -> ReadDecoder:
    """Read the configuration of a decoder.

    Args:
        config: content of `config.json`; its quantisation is left out.
        model_impl: see `ModelConfig`.

    Raises:
        UnsupportedModel: neither a family nor transformers' modules run the architecture, or a value of a field; or
            the model is an encoder.
        CheckpointError: a field is missing, of the wrong type or absurd.
        ConfigError: transformers' modules are asked for, and transformers is not installed.
    """
    config = without_quantization(config)
    if not is_hosted(config, model_impl):
        return ReadDecoder(*build(config))
    with importing_extra(OPTION):
        from quire.models.hosted.trial import examine
    if config.get(DENSE):
        raise UnsupportedModel(
            "modules.json has dense layers, which are not applied to the hidden states of transformers' modules",
            field="architectures",
        )
    return ReadDecoder(examine(config), {})


def read_model(config: Mapping[str, Any], model_impl: str = "auto") -> ModelSpec | HostedSpec | EncoderSpec:
    """Read the configuration of a decoder or an encoder; for arguments and errors, see `read_decoder`."""
    if find_encoder(config) is None:
        return read_decoder(config, model_impl).spec
    return build_encoder(without_quantization(config))[0]


def is_hosted(config: Mapping[str, Any], model_impl: str = "auto") -> bool:
    """Return whether transformers' modules run a decoder, if they can; for arguments and errors, see `read_decoder`."""
    if model_impl == "native" or find_encoder(config) is not None:
        return False
    if model_impl == "transformers":
        check_extra(OPTION)
        return True
    names = config.get("architectures")
    if find_family(config) is not None or not isinstance(names, list) or not names:
        return False
    extra, module = EXTRAS[OPTION]
    if not is_installed(module):
        raise UnsupportedModel(
            f"the architecture {shown(names[0])} is not implemented; docs/checkpoints.md lists those that are, and "
            f"pip install 'quire[{extra}]' adds those of transformers that run over paged memory",
            field="architectures",
        )
    return True


def one_process_only() -> ConfigError:
    """Return the error of a model that transformers' modules compute and that several ranks are to share."""
    return ConfigError(
        "tensor_parallel_size and pipeline_parallel_size must be 1 for this model: the modules of transformers that "
        "compute it run in one process",
        field="tensor_parallel_size",
    )
