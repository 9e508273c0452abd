"""Folders that PEFT itself writes, beside its own model with the adapter: every field that changes a scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, SamplingParams
from tests.conformance.checkpoints import save_checkpoint
from tests.models.adapters.folders import linear_widths

pytestmark = pytest.mark.slow

PROMPT = [idx * 7 % 190 + 5 for idx in range(37)]
MEASURED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
# Some PEFT refuses beside states.
WITHOUT = {"falcon-h1": ("out_proj",), "llama4": ("router",)}
CONFIGS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 6},
    {"r": 6, "lora_alpha": 5, "use_rslora": True, "init_lora_weights": "gaussian"},
    {
        "r": 3,
        "lora_alpha": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2},
        "alpha_pattern": {r"model\.layers\.[0-1]\.mlp\..*": 7, "o_proj": 1},
    },
    {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[02]\..*(q|v|o|up|down)_proj"},
]
# Scales are the same in every family.
CASES = [*(("qwen3", number) for number in range(len(CONFIGS)))]
CASES += [(family, 0) for family in ("qwen3.5", "gemma4-moe", "falcon-h1", "lfm2-moe", "phi3", "gpt-oss")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "number"), CASES)
def test_log_probabilities_are_those_of_peft(family: str, number: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = save_checkpoint(family, tmp_path / "model")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = {"target_modules": sorted(linear_widths(base, *WITHOUT.get(family, ())))}
    torch.manual_seed(3)
    model = peft.get_peft_model(base, peft.LoraConfig(**targets | CONFIGS[number]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
        model.save_pretrained(tmp_path / "adapter")
        expected = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1}
    options |= {"num_kv_blocks": 200, "max_model_len": 128, "enable_lora": True}
    with LLM(str(folder), **options) as llm:
        adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
        (output,) = llm.generate([PROMPT], MEASURED, lora_request=adapter, use_tqdm=False)
    known: Any = output.prompt_logprobs
    found = [known[at][token].logprob for at, token in enumerate(PROMPT) if at]
    wanted = expected[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=2e-4, atol=2e-4)
