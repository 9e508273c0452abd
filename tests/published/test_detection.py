"""The formats of calls and thoughts of published templates are detected, or the reason is told why they are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.reasoning import choose_reasoning_format
from quire.text.tool_calls import choose_format
from tests.published.folders import templates

# By name: the format of calls, and that of thoughts.
FORMATS: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": ("apertus", None),
    "Apriel-1.6-15b-Thinker-fixed": ("hunyuan", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm", "think"),
    "GLM-4.7-Flash": ("glm", "think"),
    "GLM-5.2": ("glm", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat31", None),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-Instruct": ("lfm2", "think"),
    "MiMo-VL": ("hermes", None),
    "MiroThinker": (None, "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_xml", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_xml", None),
    "Qwen3.5-4B": ("qwen3_xml", "think"),
    "Reka-Edge": ("hermes", "think"),
    "StepFun3.5-Flash": ("qwen3_xml", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "fireworks-ai-llama-3-firefunction-v2": (None, None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think_answer"),
    "llama-cpp-deepseek-r1": (None, "think"),
    "llama-cpp-rwkv-world": (None, "think"),
    "meetkai-functionary-medium-v3.1": ("functionary", None),
    "meetkai-functionary-medium-v3.2": ("functionary_v32", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "stepfun-ai-Step-3.5-Flash": ("qwen3_xml", "think"),
    "unsloth-Apriel-1.5": ("hunyuan", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}
NO_TOOLS = "the chat template writes no calls, and its instructions show no format"
NOT_RENDERED = "the chat template cannot be rendered with tools"
# The reasons where no format of calls is found.
REASONS = {
    **dict.fromkeys(("HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world"), NO_TOOLS),
    "microsoft-Phi-3.5-mini-instruct": NO_TOOLS,
    # They fail in transformers too: with any tool, or, as Firefunction, without variables of its own.
    "MiroThinker": f"{NOT_RENDERED}; its marks are those of mirothinker",
    "fireworks-ai-llama-3-firefunction-v2": f"{NOT_RENDERED}; its marks are those of phi4_mini",
    "llama-cpp-deepseek-r1": f"{NOT_RENDERED}; its marks are those of deepseek",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize("name", templates())
def test_formats_are_detected(name: str, renderer: Renderer) -> None:
    if name not in FORMATS:
        pytest.skip("its formats are not in this table")
    template = ChatTemplate(templates()[name], bos_token="<s>", eos_token="</s>", renderer=renderer)
    calls, thoughts = choose_format("auto", template), choose_reasoning_format("auto", template)
    assert (calls.form and calls.form.name, thoughts.form and thoughts.form.name) == FORMATS[name]
    assert (calls.form is None) == (name in REASONS)
    assert calls.form is not None or calls.reason == REASONS[name]
