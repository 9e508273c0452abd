"""Every kind of conversion in transformers' table: a filled module has the values that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from tests.hosted.filled import filled, state_of, transposed_names
from tests.hosted.small_configs import MODEL_TYPES, small_config
from tests.hosted.test_net import UNBUILDABLE


def entries(model_type: str) -> list[object]:
    """Return the entries of the table for a model type and its classes, but for plain renamings."""
    class_name = MODEL_TYPES[model_type]
    keys = (model_type, class_name, class_name.replace("ForCausalLM", "Model"))
    found = [entry for key in keys for entry in get_checkpoint_conversion_mapping(key) or ()]
    return [entry for entry in found if isinstance(entry, WeightConverter) or type(entry) is not WeightRenaming]


CONVERTED = [model_type for model_type in MODEL_TYPES if model_type not in UNBUILDABLE and entries(model_type)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONVERTED)
def test_the_state_is_what_was_saved(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        small_config(model_type), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for tensor in theirs.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    theirs.save_pretrained(tmp_path)
    found, wanted = state_of(filled(tmp_path)), theirs.state_dict()
    assert found.keys() == wanted.keys()
    transposed = transposed_names(theirs)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].mT if name in transposed else found[name], tensor), name


def test_the_table_has_the_kinds_that_are_read_and_others() -> None:
    kinds = {
        type(operation).__name__
        for model_type in MODEL_TYPES
        for entry in entries(model_type)
        for operation in getattr(entry, "operations", ())
    }
    assert {"MergeModulelist", "Concatenate", "Chunk", "Split", "Interleave"} <= kinds
    assert len(CONVERTED) > 40
