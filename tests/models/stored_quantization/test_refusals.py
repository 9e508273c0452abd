"""What is not served, or damaged, is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError, ConfigError, UnsupportedModel
from quire.models.stored_quantization import read_quantization
from tests.models.stored_quantization.packers import Files

N, K = 16, 64
Tensors = dict[str, torch.Tensor]
INTS, BYTES, HALVES = torch.int32, torch.uint8, torch.float16


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=INTS)


def scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=HALVES)


def packed() -> Tensors:
    shape = torch.tensor([N, K])
    return {".weight_packed": words(N, K // 8), ".weight_scale": scales(N, K // 32), ".weight_shape": shape}


def integers() -> Tensors:
    return {".weight": torch.zeros(N, K, dtype=torch.int8), ".weight_scale": scales(N, 1)}


def awq() -> Tensors:
    return {".qweight": words(K, N // 8), ".qzeros": words(2, N // 8), ".scales": scales(2, N)}


def gptq() -> Tensors:
    return {".qweight": words(K // 8, N), ".qzeros": words(2, N // 8), ".scales": scales(2, N)}


def experts() -> Tensors:
    return {"_blocks": torch.zeros(2, N, 2, 16, dtype=BYTES), "_scales": torch.zeros(2, N, 2, dtype=BYTES)}


def float8(scale: str = ".weight_scale_inv") -> Tensors:
    return {".weight": torch.zeros(N, K).to(torch.float8_e4m3fn), scale: torch.ones(2, 2)}


def groups(layout: str = "pack-quantized", *, model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": 32} | changes.pop("weights", {})
    group = {"targets": ["Linear"], "weights": weights} | changes
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"g": group}} | (model or {})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 32]}
FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [8, 32]}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}

SCHEMES: dict[str, tuple[dict[str, Any], Callable[[], Tensors], str]] = {
    "float of 4 bits": (groups("float-quantized", weights={"type": "float"}), float8, "this number of bits"),
    "float zeros": (groups("float-quantized", weights=FLOAT8 | {"symmetric": False}), float8, "with zero points"),
    "float strategy": (
        groups("float-quantized", weights=FLOAT8 | {"strategy": "tensor_group"}),
        float8,
        "tensor_group",
    ),
    "float in blocks of 8": (
        groups("float-quantized", weights=FLOAT8 | {"block_structure": [8, 8]}),
        lambda: float8(".weight_scale") | {".weight_scale": torch.ones(2, 8)},
        "64 inputs in groups of 8",
    ),
    "e5m2": (FP8 | {"fmt": "e5m2"}, float8, "stored as fp8 of format e5m2"),
    "mxfp8": (groups("mxfp8-quantized", weights=FLOAT8), float8, "stored as mxfp8-quantized of 8 bits"),
    "nvfp4": (groups("nvfp4-pack-quantized", weights={"type": "float"}), packed, "scales of 8-bit floating point"),
    "unknown format": (groups("marlin-24"), packed, "stored as marlin-24 of 4 bits.*the format is not implemented"),
    "float in packed": (groups(weights={"type": "float"}), packed, "codes of type float"),
    "3 bits": (groups(weights={"num_bits": 3}), packed, "stored as pack-quantized of 3 bits"),
    "tensor scale": (groups(weights={"strategy": "tensor"}), packed, "strategy tensor"),
    "block scale": (groups(weights={"strategy": "block"}), packed, "strategy block"),
    "no size": (groups(weights={"strategy": "group", "group_size": -1}), packed, "groups have no size"),
    "outputs": (groups(output_activations=STATIC), packed, "outputs are quantised"),
    "transforms": (
        groups(model={"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}),
        packed,
        "transform_config",
    ),
    "sparse": (groups(model={"sparsity_config": {"format": "sparse-24-bitmask"}}), packed, "sparsity_config"),
    "no target": (groups(targets=["b", "re:.*c"]), packed, "it is a target of no group"),
    "mx groups": (groups("mxfp4-pack-quantized", weights={"type": "float", "group_size": 64}), packed, "groups of 32"),
    "gemv": (AWQ | {"version": "gemv"}, awq, "stored as awq, version gemv"),
    "marlin": ({"quant_method": "awq", "checkpoint_format": "marlin"}, awq, "stored as awq, version marlin"),
    "awq bits": (AWQ | {"bits": 8}, awq, "of 8 bits"),
    "awq symmetric": (AWQ | {"zero_point": False}, awq, "without zero points"),
    "awq groups": (AWQ | {"group_size": 8}, awq, "64 inputs in groups of 8"),
    "gptq bits": (GPTQ | {"bits": 3}, gptq, "stored as gptq of 3 bits"),
    "gptq layout": (GPTQ | {"checkpoint_format": "marlin"}, gptq, "checkpoint_format marlin"),
    "gptq groups": (GPTQ | {"group_size": 8}, gptq, "64 inputs in groups of 8, and both must be multiples of 16"),
    "gptq no size": (GPTQ | {"group_size": 0}, gptq, "groups have no size"),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_schemes_are_refused_with_the_layer_and_what_is_served(case: str) -> None:
    config, tensors, message = SCHEMES[case]
    with pytest.raises(UnsupportedModel, match=f"layer 'a' .*{message}.*; served are compressed-tensors") as error:
        Files().add("a", tensors()).weight(config)
    assert error.value.field == "quantization_config"


@pytest.mark.parametrize("num_inputs", [40, 8, 0])
def test_inputs_that_groups_do_not_divide_are_refused(num_inputs: int) -> None:
    tensors = packed() | {
        ".weight_packed": words(N, num_inputs // 8),
        ".weight_shape": torch.tensor([N, num_inputs]),
        ".weight_scale": scales(N, min(1, num_inputs)),
    }
    with pytest.raises(UnsupportedModel, match=f"layer 'a' .*it has {num_inputs} inputs"):
        Files().add("a", tensors).weight(groups(weights={"group_size": -1}))


def test_mxfp4_needs_whole_groups() -> None:
    tensors = {
        ".weight_packed": torch.zeros(N, 24, dtype=BYTES),
        ".weight_scale": torch.zeros(N, 2, dtype=BYTES),
    }
    with pytest.raises(UnsupportedModel, match=r"layer 'a' .*it has 48 inputs, and a multiple of 32"):
        Files().add("a", tensors).weight(groups("mxfp4-pack-quantized", weights={"type": "float"}))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fbgemm_fp8", "by the method 'fbgemm_fp8', .*the method is not implemented; served are .*fp8 .e4m3"),
        ("bitsandbytes", "its codes refer to tables"),
        ("modelopt", "its formats of 8-bit and 4-bit floating point are not implemented"),
        ("new", "the method is not implemented; served are"),
        ("", "the method is not implemented"),
    ],
)
def test_methods_are_refused_by_name(method: str, message: str) -> None:
    files = (
        Files().add("n", {".weight": torch.ones(4)}).add("a", {".weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    )
    with pytest.raises(UnsupportedModel, match=message):
        read_quantization({"quantization_config": {"quant_method": method, "bits": 8}}, files.headers())


@pytest.mark.parametrize(
    ("config", "tensors", "where"),
    [
        (groups(model={"ignore": ["a"]}), packed, "ignore"),
        (groups(model={"ignore": ["b", "re:a$"]}), packed, "ignore"),
        (groups("int-quantized", model={"ignore": ["a"]}), integers, "ignore"),
        (AWQ | {"modules_to_not_convert": ["a"]}, awq, "modules_to_not_convert"),
        (FP8 | {"modules_to_not_convert": ["a"]}, float8, "modules_to_not_convert"),
        (GPTQ | {"dynamic": {"-:a": {}}}, gptq, "dynamic"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}, experts, "modules_to_not_convert"),
    ],
)
def test_quantised_layers_that_should_be_plain_are_refused(
    config: dict[str, Any], tensors: Callable[[], Tensors], where: str
) -> None:
    with pytest.raises(CheckpointError, match=f"layer 'a' is stored without a plain weight, but {where} of"):
        Files().add("a", tensors()).weight(config)


DAMAGED: dict[str, tuple[dict[str, Any], Callable[[], Tensors], Tensors, str]] = {
    "dtype": (groups(), packed, {".weight_packed": scales(N, 8)}, "'a.weight_packed' is of dtype F16; I32 is needed"),
    "dims": (groups(), packed, {".weight_packed": words(8)}, "of shape .8.; 2 dimensions"),
    "scales": (groups(), packed, {".weight_scale": scales(N, 3)}, r"'a.weight_scale' is of shape \[16, 3\]; \[16, 2\]"),
    "scale dtype": (groups(), packed, {".weight_scale": words(N, 2)}, "dtype I32; BF16 or F16 or F32"),
    "shape": (groups(), packed, {".weight_shape": torch.tensor([N, 63])}, r"'a.weight_shape' is \[16, 63\]"),
    "order": (groups(), packed, {".weight_g_idx": words(K)}, "g_idx that does not divide 64 inputs into groups of 32"),
    "zeros": (
        groups(weights={"symmetric": False}),
        packed,
        {".weight_zero_point": words(3, 2)},
        r"'a.weight_zero_point' is of shape \[3, 2\]; \[2, 2\]",
    ),
    "integers": (
        groups("int-quantized", weights={"group_size": -1}),
        integers,
        {".weight": words(N, K)},
        "'a.weight' is of dtype I32; I8",
    ),
    "mx scales": (
        groups("mxfp4-pack-quantized", weights={"type": "float"}),
        packed,
        {".weight_packed": torch.zeros(N, K // 2, dtype=BYTES)},
        "'a.weight_scale' is of dtype F16; U8",
    ),
    "float codes": (FP8, float8, {".weight": torch.zeros(N, K).to(torch.float8_e5m2)}, "is of dtype F8_E5M2; F8_E4M3"),
    "float scales": (
        FP8,
        float8,
        {".weight_scale_inv": torch.ones(2, 3)},
        r"'a.weight_scale_inv' is of shape \[2, 3\]",
    ),
    "float dims": (FP8, float8, {".weight": torch.zeros(N).to(torch.float8_e4m3fn)}, "2 dimensions are needed"),
    "float scale dtype": (FP8, float8, {".weight_scale_inv": words(2, 2)}, "is of dtype I32; F32 or BF16"),
    "awq zeros": (AWQ, awq, {".qzeros": words(2, 1)}, "'a.qzeros' is of shape"),
    "awq scales": (AWQ, awq, {".scales": scales(2, N + 1)}, "'a.scales' is of shape"),
    "gptq zeros": (GPTQ, gptq, {".qzeros": words(1, 2)}, "'a.qzeros' is of shape"),
    "gptq order": (GPTQ, gptq, {".g_idx": words(K) - 1}, "g_idx that does not divide"),
    "gptq short order": (GPTQ, gptq, {".g_idx": words(K - 1)}, "'a.g_idx' is of shape"),
    "blocks": (
        {"quant_method": "mxfp4"},
        experts,
        {"_blocks": torch.zeros(2, N, 2, 15, dtype=BYTES)},
        "'a_blocks' is of shape",
    ),
    "exponents": ({"quant_method": "mxfp4"}, experts, {"_scales": words(2, N, 2).to(BYTES)[:1]}, "'a_scales' is of"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_refused_by_name(case: str) -> None:
    config, tensors, changes, message = DAMAGED[case]
    with pytest.raises(CheckpointError, match=message):
        Files().add("a", tensors() | changes).weight(config)


@pytest.mark.parametrize(
    ("config", "tensors", "missing"),
    [
        (groups(), packed, ".weight_scale"),
        (groups(), packed, ".weight_shape"),
        (groups(weights={"symmetric": False}), packed, ".weight_zero_point"),
        (AWQ, awq, ".qzeros"),
        (FP8, float8, ".weight_scale_inv"),
        (groups("float-quantized", weights=FLOAT8), float8, ".weight_scale"),
        (GPTQ, gptq, ".scales"),
        (GPTQ | {"desc_act": True}, gptq, ".g_idx"),
        ({"quant_method": "mxfp4"}, experts, "_scales"),
    ],
)
def test_missing_tensors_are_named(config: dict[str, Any], tensors: Callable[[], Tensors], missing: str) -> None:
    stored = tensors()
    stored.pop(missing, None)
    with pytest.raises(CheckpointError, match=f"no tensor 'a{missing}'"):
        Files().add("a", stored).weight(config)


@pytest.mark.parametrize(
    ("config", "tensors", "changes"),
    [
        (groups(), packed, {".weight_scale": scales(N, 2) * torch.inf}),
        (groups("int-quantized", weights={"group_size": -1}), integers, {".weight_scale": scales(N, 1) * torch.nan}),
        (AWQ, awq, {".scales": scales(2, N) * torch.inf}),
        (GPTQ, gptq, {".scales": scales(2, N) * torch.nan}),
        (FP8, float8, {".weight_scale_inv": torch.full((2, 2), torch.inf)}),
        (FP8, float8, {".weight_scale_inv": torch.full((2, 2), 255, dtype=BYTES)}),
        ({"quant_method": "mxfp4"}, experts, {"_scales": torch.full((2, N, 2), 255, dtype=BYTES)}),
    ],
)
def test_scales_that_are_no_numbers_are_refused(
    config: dict[str, Any], tensors: Callable[[], Tensors], changes: Tensors
) -> None:
    found = Files().add("a", tensors() | changes).weight(config)
    with pytest.raises(CheckpointError, match="layer 'a' has scales that are infinite or no numbers"):
        found.weight.read(slice(0, 2))


def test_codes_that_are_no_numbers_are_refused() -> None:
    for code in (0x7F, 0xFF):
        stored = float8()
        stored[".weight"].view(torch.uint8)[1, 3] = code
        found = Files().add("a", stored).weight(FP8)
        assert not found.weight.read(slice(0, 1)).codes.any()
        with pytest.raises(CheckpointError, match="layer 'a' has codes that are no numbers"):
            found.weight.read(slice(0, 2))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0.5, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [2**40, 128]}, "weight_block_size"),
        (groups("float-quantized", weights=FLOAT8 | {"block_structure": [1, -1]}), "block_structure"),
        ("gptq", "quantization_config"),
        (GPTQ | {"bits": "4"}, "bits"),
        (GPTQ | {"dynamic": {"a": 3}}, "a"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "quantization_config"),
        (AWQ | {"group_size": 0}, "group_size"),
        (AWQ | {"zero_point": 1}, "zero_point"),
        (AWQ | {"modules_to_not_convert": "a"}, "modules_to_not_convert"),
        (groups(targets="Linear"), "targets"),
        (groups(model={"config_groups": {"W4A16": ["Linear"]}}), "W4A16"),
        (groups(model={"ignore": ["re:["]}), "quantization_config"),
        (groups(weights={"group_size": -2}), "group_size"),
    ],
)
def test_fields_of_a_wrong_type_are_named(config: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_quantization({"quantization_config": config}, Files().add("a", packed()).headers())
    assert error.value.field == field


def test_no_configuration_is_no_quantisation() -> None:
    assert read_quantization({}, {}) is None
    assert read_quantization({"quantization_config": None, "text_config": {"hidden_size": 4}}, {}) is None


def test_the_configuration_of_the_text_model_counts() -> None:
    found = read_quantization({"text_config": {"quantization_config": GPTQ}}, Files().add("a", gptq()).headers())
    assert found.suffixes("a") == (".qweight", ".qzeros", ".scales")


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    ["a"],
    [["a"]],
    {},
    {"a": 1},
    {"a": {}},
)


def altered(value: Any) -> Iterator[Any]:
    """Yield an object with an odd value in the place of each of its values, at any depth."""
    for key, item in value.items():
        yield from ({**value, key: odd} for odd in ODD)
        if isinstance(item, dict):
            yield from ({**value, key: each} for each in altered(item))


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (groups(model={"ignore": []}, weights={"strategy": "group", "symmetric": True}), packed),
        (groups("int-quantized", weights={"num_bits": 8, "group_size": -1}, input_activations=STATIC), integers),
        (groups(model={"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}}), packed),
        (AWQ | {"modules_to_not_convert": []}, awq),
        (FP8 | {"modules_to_not_convert": [], "ignored_layers": [], "fmt": "e4m3"}, float8),
        (groups("float-quantized", weights=FLOAT8, input_activations=STATIC), lambda: float8(".weight_scale")),
        (GPTQ | {"desc_act": False, "checkpoint_format": "gptq", "dynamic": {}}, gptq),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, experts),
    ],
)
def test_any_value_of_any_field_is_read_or_refused(config: dict[str, Any], tensors: Callable[[], Tensors]) -> None:
    files = Files().add("a", tensors())
    refused = 0
    for each in altered({"quantization_config": config, "text_config": None}):
        try:
            found = read_quantization(each, files.headers())
            if found is not None and found.suffixes("a") is not None:
                found.weight("a", files.tensor).weight.read(slice(0, 1))
        except ConfigError:
            refused += 1
    assert refused > 20
