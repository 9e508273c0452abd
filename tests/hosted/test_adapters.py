"""Adapters on modules of transformers: log probabilities are PEFT's, row by row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.errors import ConfigError, QuireError
from quire.sequences.lora import LoRARequest
from tests.hosted.filled import save
from tests.models.adapters.folders import random_matrices, write_adapter

PROMPT = [3, 5, 7, 90, 11, 6, 8, 41, 2]
MEASURED = SamplingParams(max_tokens=1, prompt_logprobs=0)
# Layers of PEFT's adapters: [in, out] weights, latent attention beside experts, plain ones.
TARGETS = {
    "gpt2": ["c_attn", "c_fc", "mlp.c_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    "cohere": ["q_proj", "k_proj", "up_proj", "down_proj"],
}
OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_threads": 1,
    "num_kv_blocks": 60,
    "max_model_len": 48,
    "enable_lora": True,
}


def logprobs(output: Any) -> torch.Tensor:
    """Return the log probability of each token of `PROMPT` but the first."""
    known = output.prompt_logprobs
    return torch.tensor([known[at][token].logprob for at, token in enumerate(PROMPT) if at])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TARGETS)
def test_log_probabilities_are_those_of_peft(model_type: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save(model_type, tmp_path / "model")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.manual_seed(3)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[model_type]))
    with torch.no_grad():
        plain = base(torch.tensor([PROMPT])).logits[0]
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
        model.save_pretrained(tmp_path / "adapter")
        adapted = model(torch.tensor([PROMPT])).logits[0]
    wanted = [logits.log_softmax(-1)[torch.arange(len(PROMPT) - 1), PROMPT[1:]] for logits in (adapted, plain, adapted)]
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        requests: list[Any] = [adapter, None, adapter]
        outputs = llm.generate([PROMPT] * 3, MEASURED, lora_request=requests, use_tqdm=False)
    for output, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(logprobs(output), expected, rtol=2e-4, atol=2e-4)
    assert (wanted[0] - wanted[1]).abs().max() > 0.02


def test_layers_that_take_no_adapters_are_named(tmp_path: Path) -> None:
    """The head and the experts of the registry."""
    save("deepseek_v3", tmp_path / "model")
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        for module, widths in (("lm_head", (97, 32)), ("model.layers.1.mlp.experts.0.up_proj", (16, 32))):
            folder = write_adapter(tmp_path / module, random_matrices({module: widths}))
            with pytest.raises(QuireError, match=module):
                llm.generate([PROMPT], MEASURED, lora_request=LoRARequest("a", 1, str(folder)), use_tqdm=False)


def test_merging_is_refused(tmp_path: Path) -> None:
    save("cohere", tmp_path / "model")
    folder = write_adapter(tmp_path / "a", random_matrices({"model.layers.0.self_attn.q_proj": (32, 32)}))
    with pytest.raises(ConfigError, match="merge_lora"):
        LLM(str(tmp_path / "model"), **OPTIONS | {"enable_lora": False, "merge_lora": str(folder)})


def test_families_are_loaded_without_transformers() -> None:
    code = "import sys, quire.engine.startup.loading; print('transformers' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
