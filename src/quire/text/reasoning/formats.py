"""The formats of thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.text.reasoning.harmony import Harmony
from quire.text.reasoning.parser import ReasoningFormat
from quire.text.reasoning.tags import ReasoningTags

# Qwen3, DeepSeek R1 to V4, GLM, Kimi K2, MiniMax M2, Nemotron 3, OLMo 3, SmolLM3, Step 3 and others.
THINK = ReasoningTags("think", "<think>", "</think>")
# Hunyuan A13B; ERNIE 4.5 and Granite 3.3.
THINK_ANSWER = replace(
    THINK, name="think_answer", answer_tags=(("<answer>", "</answer>"), ("<response>", "</response>"))
)
GEMMA4 = ReasoningTags("gemma4", "<|channel>", "<channel|>", "thought\n", ("<|turn>",))
APERTUS = ReasoningTags("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
APRIEL = ReasoningTags(
    "apriel",
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    answer_tags=(("", "[END FINAL RESPONSE]"),),
)
# Command R7B and Command A.
COHERE = ReasoningTags(
    "cohere",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    answer_tags=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)
# Granite 3.2.
GRANITE = ReasoningTags("granite", "Here is my thought process:", "Here is my response:")
KIMI_VL = ReasoningTags("kimi_vl", "◁think▷", "◁/think▷")
# MiniMax M3, which begins an answer without thoughts with the closing tag.
MINIMAX_M3 = ReasoningTags("minimax_m3", "<mm:think>", "</mm:think>", answer_tags=(("</mm:think>", ""),))
# Magistral, Ministral 3.
MISTRAL = ReasoningTags("mistral", "[THINK]", "[/THINK]")
SEED_OSS = ReasoningTags("seed_oss", "<seed:think>", "</seed:think>")
SOLAR_OPEN2 = ReasoningTags("solar_open2", "<|think:start|>", "<|think:end|>")
ALL: tuple[ReasoningFormat, ...] = (
    *(APERTUS, APRIEL, COHERE, GEMMA4, GRANITE, Harmony(), KIMI_VL, MINIMAX_M3, MISTRAL),
    *(SEED_OSS, SOLAR_OPEN2, THINK, THINK_ANSWER),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {form.name: form for form in ALL}
