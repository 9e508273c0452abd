"""Folders of adapters: what is read, and damaged, foreign or hostile ones, refused by a message that names why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from quire.models.adapters.expert_layers import ExpertLayers, is_first_of_inputs
from quire.models.adapters.names import module_key
from quire.models.adapters.peft_folder import ModuleShape, PeftAdapter, read_peft
from quire.models.specs.spec import Attention, Experts, LayerSpec, ModelSpec, RMSNorm
from quire.platform.bounded.patterns import match_names
from tests.models.adapters.folders import PREFIX, random_matrices, write_adapter

WIDTHS = {f"model.layers.{idx}.self_attn.{name}": (8, 6) for idx in range(2) for name in ("q_proj", "v_proj")}
SHAPES = {module_key(name): ModuleShape(in_width, out_width) for name, (out_width, in_width) in WIDTHS.items()}
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj"
NORM = RMSNorm(1e-6)
# Three experts of 5 gated columns, the second layer's transposed, and those of a third with 3 columns: twice of that
# are as many as the inputs.
SPEC = ModelSpec(
    vocab_size=9,
    width=6,
    layers=tuple(
        LayerSpec(NORM, Attention(2, 1, 4, None), each)
        for each in (Experts(3, 2, 5), Experts(3, 2, 5, parameters="alternating"), Experts(3, 2, 3))
    ),
    norm=NORM,
    tied_head=True,
    max_position=9,
)
EXPERTS = ExpertLayers(
    SPEC, {f"layers.{idx}.ffn.gate_up.weight": (f"model.layers.{idx}.mlp.experts.gate_up_proj",) for idx in range(3)}
)
STACK = "model.layers.0.mlp.experts"


def write(folder: Path, **config: Any) -> Path:
    return write_adapter(folder, random_matrices(WIDTHS), **config)


def read(folder: Path, max_rank: int = 16) -> PeftAdapter:
    return read_peft(folder, SHAPES, EXPERTS, max_rank)


def scales(folder: Path, **config: Any) -> list[float]:
    return [each.scale for _, each in sorted(read(write(folder, **config)).matrices.items())]


def test_scales_follow_alpha_rank_and_patterns(tmp_path: Path) -> None:
    assert scales(tmp_path, lora_alpha=6) == [1.5] * 4
    assert scales(tmp_path, lora_alpha=6, use_rslora=True) == [3.0] * 4
    assert scales(tmp_path, alpha_pattern={"layers.1.self_attn.v_proj": 2, "q_proj": 4}) == [1.0, 2.0, 1.0, 0.5]
    assert scales(tmp_path, alpha_pattern={r"model\.layers\.[1-9]\..*": 4}) == [2.0, 2.0, 1.0, 1.0]
    assert scales(tmp_path, r=9, rank_pattern={"q_proj": 4, ".*v_proj": 4}, lora_alpha=4) == [1.0] * 4
    assert scales(tmp_path, target_modules=["v_proj", "q_proj"]) == [2.0] * 4
    assert scales(tmp_path, target_modules=r".*\.(q|v)_proj") == [2.0] * 4
    assert scales(tmp_path, target_modules="all-linear") == [2.0] * 4


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "a")).digest
    assert read(write(tmp_path / "b", inference_mode=True, lora_dropout=0.1)).digest == plain
    assert read(write(tmp_path / "c", lora_alpha=9)).digest != plain
    assert read(write_adapter(tmp_path / "d", random_matrices(WIDTHS, seed=1))).digest != plain


def test_names_of_other_wrappers_are_the_language_model_s(tmp_path: Path) -> None:
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): each
        for name, each in random_matrices(WIDTHS).items()
    }
    assert read(write_adapter(tmp_path, tensors)).matrices.keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' must be LORA"),
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"lora_bias": True}, "'lora_bias' is not supported"),
        ({"bias": "all"}, "'bias' must be"),
        ({"bias": "lora_only"}, "'bias' must be"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "olora"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "corda"}, "'init_lora_weights' must be"),
        ({"init_lora_weights": "loftq"}, "'init_lora_weights' must be"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
        ({"target_parameters": "mlp.experts.down_proj"}, "'target_parameters' must be a list of names"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices' is not supported"),
        ({"new_field": 7}, "'new_field' is not supported, got 7: the field is not known"),
        ({"r": 0}, "'r' must be a positive integer, got 0"),
        ({"r": "4"}, "'r' must be a positive integer"),
        ({"r": 5}, "must be of shape \\[5, 6\\], got \\[4, 6\\]"),
        ({"lora_alpha": None}, "'lora_alpha' must be a number"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' must be a number"),
        ({"use_rslora": "yes"}, "'use_rslora' must be true or false"),
        ({"rank_pattern": {"q_proj": 0}}, "'rank_pattern.q_proj' must be a positive integer"),
        ({"rank_pattern": [3]}, "'rank_pattern' must be an object"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
        ({"target_modules": 5}, "'target_modules' must be a list"),
        ({"target_modules": ["k_proj"]}, "which target_modules does not name"),
        ({"target_modules": r".*\.q_proj"}, "which target_modules does not name"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, **config))


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a function that changes the tensors of a folder."""

    def run(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return run


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def grow(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "not a whole safetensors file"),
        (pipe, "cannot be read"),
        (grow, "cannot be read: it is longer than"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 99), "not a whole safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""), "not a whole safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 9999), "is not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "must hold a JSON object"),
        (changed(dict.clear), "has no adapter for any module"),
        (changed(lambda each: each.pop(f"{FIRST}.lora_B.weight")), "has only lora_A"),
        (changed(lambda each: each.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 7)})), "must be of shape"),
        (changed(lambda each: each.update({f"{FIRST}.lora_B.weight": torch.zeros(8, 4, 1)})), "must be a matrix"),
        (changed(lambda each: each.update({f"{FIRST}.lora_A.weight": torch.zeros(4)})), "must be a matrix"),
        (
            changed(lambda each: each.update({name: torch.tensor(1.0) for name in each})),
            r"a matrix, got the shape \[\]",
        ),
        (
            changed(lambda each: each.update({f"a{idx}": torch.zeros(0) for idx in range(2000)})),
            "must have at most 1,086 tensors, got 2,008",
        ),
        (changed(lambda each: each[f"{FIRST}.lora_A.weight"].view(-1)[3:4].fill_(torch.nan)), "no finite numbers"),
        (changed(lambda each: each[f"{FIRST}.lora_B.weight"].fill_(torch.inf)), "no finite numbers"),
        (changed(lambda each: each.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 6).char()})), "torch.int8"),
        (changed(lambda each: each.update({"lm_head.weight": torch.zeros(2, 2)})), "is not lora_A.weight"),
        (changed(lambda each: each.update({f"{FIRST}.lora_magnitude_vector": torch.zeros(8)})), "is not lora_A.weight"),
        (changed(lambda each: each.update({f"{FIRST}.lora_B.bias": torch.zeros(8)})), "is not lora_A.weight"),
        (
            changed(lambda each: each.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 6)})),
            "'lm_head', which is no linear layer of the model's layers, or of an expert",
        ),
        (
            changed(lambda each: each.update({f"{FIRST[:-6]}9_proj.lora_A.weight": torch.zeros(4, 6)})),
            "which is no linear layer",
        ),
        (
            changed(lambda each: each.update({k.replace("model.model", "model"): v + 1 for k, v in [*each.items()]})),
            "two adapters for the module",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = write(tmp_path, target_modules="all-linear")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "cannot be read: File name too long"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("\ud800", r"the adapter .*\\ud800' cannot be read"),
        ("file", "is no folder; one with adapter_config"),
        ("none", "is no folder; one with adapter_config"),
    ],
)
def test_paths_that_are_no_folder_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / name)


def test_ranks_end_at_the_limit(tmp_path: Path) -> None:
    assert read(write(tmp_path), 4).matrices
    with pytest.raises(CheckpointError, match=r"rank 4 in .*above max_lora_rank, which is 3"):
        read(tmp_path, 3)


def test_a_pattern_that_takes_exponential_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = partial(match_names, timeout_s=0.5)
    monkeypatch.setattr("quire.models.adapters.peft_config.match_names", limited)
    folder = write(tmp_path, alpha_pattern={"(.|.)*!": 3})
    with pytest.raises(CheckpointError, match="alpha_pattern"):
        read(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["alpha_pattern"]


def stacked(
    folder: Path,
    layer: int = 0,
    rank: int = 2,
    parameter: str = "gate_up_proj",
    *,
    reverse: bool = False,
    **config: Any,
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Write an adapter of a parameter of all experts, and return its folder and both matrices."""
    width = (5, 5, 3)[layer]
    widths = (6, 2 * width) if parameter == "gate_up_proj" else (width, 6)
    in_width, out_width = reversed(widths) if reverse else widths
    a, b = torch.randn(3 * rank, in_width), torch.randn(out_width, 3 * rank)
    module = f"{PREFIX}model.layers.{layer}.mlp.experts{'.base_layer' if parameter == 'gate_up_proj' else ''}"
    fields: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": None}
    fields["target_parameters"] = [f"mlp.experts.{parameter}"]
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return write_adapter(folder, tensors, **fields | config), a, b


def delta(adapter: PeftAdapter, weight: str, expert: int) -> torch.Tensor:
    ((first_row, a, b, scale),) = adapter.experts[weight][expert]
    assert (first_row, scale) == (0, 2.0)
    return b @ a


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("layer", "parameter"), [(0, "gate_up_proj"), (0, "down_proj"), (1, "gate_up_proj")])
def test_ranks_of_all_experts_are_taken_apart(layer: int, parameter: str, reverse: bool, tmp_path: Path) -> None:
    folder, a, b = stacked(tmp_path, layer, parameter=parameter, reverse=reverse)
    adapter = read(folder)
    name = f"layers.{layer}.ffn.{parameter.removesuffix('_proj')}.weight"
    for expert in range(3):
        expected = b[:, expert::3] @ a[2 * expert : 2 * expert + 2]  # the experts of a rank lie together in B
        expected = expected.T if reverse else expected
        if layer == 1:  # gates and ups take turns
            expected = torch.cat([expected[::2], expected[1::2]])
        torch.testing.assert_close(delta(adapter, name, expert), expected)


@pytest.mark.parametrize(
    ("version", "is_straight"),
    [("0.17.1", False), ("0.18.1", False), ("0.19.0", False), ("0.19.1", True), ("0.21.2", True)],
)
def test_the_version_tells_which_matrix_is_of_the_inputs(version: str, is_straight: bool, tmp_path: Path) -> None:
    folder, a, b = stacked(tmp_path, 2, peft_version=version)
    expected = b[:, ::3] @ a[:2]
    found = delta(read(folder), "layers.2.ffn.gate_up.weight", 0)
    torch.testing.assert_close(found, expected if is_straight else expected.T)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("rows", (False, False, True, None)),
        ("columns", (True, True, False, None)),
        ("alternating", (True, False, True, True)),
    ],
)
def test_the_order_depends_on_the_model_too(layout: str, expected: tuple[bool | None, ...]) -> None:
    layer = EXPERTS.layers["layers.2.ffn.gate_up.weight"]._replace(layout=layout)
    versions = ((0, 18, 1), (0, 19, 0), (0, 19, 1), None)
    assert tuple(is_first_of_inputs(layer, 6, version) for version in versions) == expected


@pytest.mark.parametrize("version", [None, "0.21.0.dev0", 7])
def test_an_order_that_is_not_known_is_refused(version: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"peft_version must say which .*experts.base_layer' multiplies"
    ) as caught:
        read(stacked(tmp_path, 2, peft_version=version)[0])
    assert caught.value.field == "peft_version"


def test_scales_of_parameters_follow_their_names(tmp_path: Path) -> None:
    def scale(**config: Any) -> float:
        adapter = read(stacked(tmp_path, **config)[0])
        return adapter.experts["layers.0.ffn.gate_up.weight"][1][0].scale

    assert scale() == 2.0
    assert scale(alpha_pattern={r".*\.gate_up_proj": 5}) == 2.5
    assert scale(r=7, rank_pattern={"mlp.experts.gate_up_proj": 2}, alpha_pattern={"experts.down_proj": 9}) == 2.0


def linear_experts(*parts: str, experts: int = 3) -> dict[str, torch.Tensor]:
    widths = {"gate_proj": (5, 6), "up_proj": (5, 6), "down_proj": (6, 5), "w1": (5, 6)}
    return random_matrices({f"{STACK}.{idx}.{part}": widths[part] for idx in range(experts) for part in parts})


def test_each_expert_may_have_linear_layers(tmp_path: Path) -> None:
    tensors = linear_experts("gate_proj", "up_proj", "down_proj")
    adapter = read(write_adapter(tmp_path, tensors, target_modules=["gate_proj", "up_proj", "down_proj"]))
    rows = {first_row: b for first_row, _, b, _ in adapter.experts["layers.0.ffn.gate_up.weight"][2]}
    assert torch.equal(rows[0], tensors[f"{PREFIX}{STACK}.2.gate_proj.lora_B.weight"])
    assert torch.equal(rows[5], tensors[f"{PREFIX}{STACK}.2.up_proj.lora_B.weight"])
    assert len(adapter.experts["layers.0.ffn.down.weight"]) == 3


def both_forms() -> dict[str, torch.Tensor]:
    of_all = {f"{PREFIX}{STACK}.lora_A.weight": torch.ones(12, 6), f"{PREFIX}{STACK}.lora_B.weight": torch.ones(10, 12)}
    return linear_experts("up_proj") | of_all


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (linear_experts("gate_proj", experts=4), {}, "experts.3.gate_proj', which is no linear layer"),
        (linear_experts("gate_proj"), {"target_modules": ["up_proj"]}, "gate_proj', which target_modules does not"),
        (linear_experts("gate_proj", "w1"), {}, "two adapters for the module '.*gate_proj|w1'"),
        (both_forms(), {"target_parameters": ["experts.gate_up_proj"]}, "two adapters for the module"),
    ],
)
def test_adapters_of_single_experts_that_are_refused(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(write_adapter(tmp_path, tensors, **config))


@pytest.mark.parametrize(
    ("options", "damage", "message"),
    [
        ({"target_parameters": ["down_proj"]}, None, "parameter 'model.layers.0.mlp.experts.gate_up_proj', which"),
        ({"rank": 20, "r": 20}, None, "rank 20 in '.*base_layer', above max_lora_rank"),
        ({"r": 3}, None, r"lora_A of '.*base_layer' must be of shape \[9, 6\], got \[6, 6\]"),
        ({}, lambda each: each.view(-1)[5:6].fill_(torch.nan), "base_layer' holds values that are no finite numbers"),
        ({}, lambda each: each.resize_(4, 6), r"must be of shape \[6, 6\], got \[4, 6\]"),
        ({}, lambda each: each.resize_(9, 4), r"must have the widths 6 and 10 \(gate_up_proj\) or 5 and 6"),
        ({}, lambda each: each.resize_(3, 2, 6), "must be a matrix"),
    ],
)
def test_adapters_of_all_experts_that_are_refused(
    options: dict[str, Any], damage: Callable[[torch.Tensor], object] | None, message: str, tmp_path: Path
) -> None:
    folder, _, _ = stacked(tmp_path, **options)
    if damage is not None:
        changed(lambda each: damage(each[f"{PREFIX}{STACK}.base_layer.lora_A.weight"]))(folder)
    with pytest.raises(CheckpointError, match=message):
        read(folder)
