"""Parsers of reasoning: known outputs of each format, and their independence of where the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sequences.thinking import ThinkingPhase
from quire.text.reasoning import REASONING_FORMATS, ReasoningSplit
from quire.text.reasoning.harmony import MAX_HEADER_CHARS

BEFORE, INSIDE, AFTER = ThinkingPhase.BEFORE, ThinkingPhase.INSIDE, ThinkingPhase.AFTER
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
CALLED = "<|channel|>commentary to=functions.f<|message|>{}"
LONG = "<|channel|>" + "x" * MAX_HEADER_CHARS + "<|message|>a"
# Format, phase at the beginning, output, reasoning, content.
CASES = [
    ("think", BEFORE, "<think>\nWhy? So.\n</think>\n\nYes.\n", "Why? So.", "Yes.\n"),
    ("think", BEFORE, "\n<think>a</think>b", "a", "b"),
    ("think", BEFORE, "<think>\n\n</think>\n\nYes", "", "Yes"),
    ("think", BEFORE, " Yes, <think> is a tag.", "", " Yes, <think> is a tag."),
    ("think", BEFORE, "<thin", "", "<thin"),
    ("think", BEFORE, "<think>cut  ", "cut  ", ""),
    ("think", BEFORE, "<think>cut </thi", "cut </thi", ""),
    ("think", BEFORE, "<think>a</think>b</think><think>c", "a", "b</think><think>c"),
    ("think", INSIDE, "a < b\n\n</think>c", "a < b", "c"),
    ("think", INSIDE, "<think>\na</think>c", "a", "c"),
    ("think", INSIDE, "\n\n</think> ", "", ""),
    ("think", INSIDE, "no end", "no end", ""),
    ("think", AFTER, "\n<think>x</think>", "", "\n<think>x</think>"),
    ("gemma4", BEFORE, "<|channel>thought\nWhy?\n<channel|>Yes", "Why?", "Yes"),
    ("gemma4", BEFORE, "<|channel>thought\n<channel|>Yes", "", "Yes"),
    ("gemma4", BEFORE, "<|channel>thoughtful<channel|>Yes", "thoughtful", "Yes"),
    ("gemma4", INSIDE, "Why?<channel|>Yes", "Why?", "Yes"),
    ("gemma4", AFTER, "Yes", "", "Yes"),
    ("seed_oss", BEFORE, "<seed:think>\nWhy?</seed:think>Yes", "Why?", "Yes"),
    ("mistral", BEFORE, "[THINK]Why?[/THINK]Yes", "Why?", "Yes"),
    ("solar_open2", INSIDE, "Why?<|think:end|>Yes", "Why?", "Yes"),
    ("minimax_m3", BEFORE, "<mm:think>Why?</mm:think>Yes", "Why?", "Yes"),
    ("minimax_m3", BEFORE, "</mm:think>\nYes", "", "Yes"),
    ("minimax_m3", BEFORE, "Yes </mm:think>", "", "Yes </mm:think>"),
    ("kimi_vl", BEFORE, "◁think▷Why?◁/think▷Yes", "Why?", "Yes"),
    ("apertus", BEFORE, "<|inner_prefix|>Why?<|inner_suffix|>Yes", "Why?", "Yes"),
    ("granite", BEFORE, "Here is my thought process: Why?\n\nHere is my response: Yes", "Why?", "Yes"),
    ("granite", BEFORE, "Here is my cat", "", "Here is my cat"),
    ("apriel", INSIDE, "Why?\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]\n", "Why?", "Yes"),
    ("apriel", INSIDE, "Why?\n[BEGIN FINAL RESPONSE]\nYes", "Why?", "Yes"),
    ("think_answer", BEFORE, "<think>\nWhy?\n</think>\n<answer>\nYes\n</answer>", "Why?", "Yes"),
    ("think_answer", INSIDE, "Why?\n</think>\n\n<response>\nYes\n</response>\n", "Why?", "Yes"),
    ("think_answer", BEFORE, "<think>Why?</think>Yes <answer>", "Why?", "Yes <answer>"),
    ("think_answer", AFTER, "\n<respon", "", "\n<respon"),
    ("think_answer", AFTER, "<answer>Yes </ans", "", "Yes </ans"),
    ("think_answer", AFTER, "<answer>Yes</answer>\n<tool_call>", "", "Yes<tool_call>"),
    ("cohere", BEFORE, "<|START_THINKING|>Why?<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", "Why?", "Yes"),
    ("cohere", AFTER, "<|START_TEXT|>Yes<|END_TEXT|>", "", "Yes"),
    ("cohere", BEFORE, "<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[", "a", "<|START_ACTION|>["),
    ("harmony", BEFORE, f"{ANALYSIS}Why?{NEXT}{FINAL}Yes", "Why?", "Yes"),
    ("harmony", BEFORE, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}Yes", "a\n\nb", "Yes"),
    ("harmony", BEFORE, f"<|channel|>commentary<|message|>a{NEXT}{FINAL}b", "", "a\n\nb"),
    ("harmony", BEFORE, f"{ANALYSIS}a{NEXT}{CALL}<|call|>", "a", f"{CALLED}<|call|>"),
    ("harmony", BEFORE, f"{ANALYSIS}a{NEXT} to=functions.f{ANALYSIS}{{}}", "a", CALLED),
    ("harmony", BEFORE, f"{FINAL}Yes<|", "", "Yes<|"),
    ("harmony", BEFORE, "Yes without channels", "", "Yes without channels"),
    ("harmony", BEFORE, f"{ANALYSIS}a<|end|><|start|>assis", "a", ""),
    ("harmony", BEFORE, LONG, "", LONG),
    ("harmony", INSIDE, f"Why?{NEXT}{FINAL}Yes", "Why?", "Yes"),
    ("harmony", AFTER, "Yes", "", "Yes"),
]  # fmt: skip
PIECES = [
    *("<think>", "</think>", "<|channel>", "<channel|>", "thought\n", ANALYSIS, FINAL, NEXT, CALL, "<|call|>"),
    *("<|start|>", "<|message|>", "<", "|", "a", " ", "\n", "to="),
    *("<answer>", "</answer>", "<response>", "</response>", "<|START_THINKING|>", "<|END_THINKING|>"),
    *("<|START_TEXT|>", "<|END_TEXT|>", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    *("Here is my thought process:", "Here is my response:", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
]


def split(name: str, phase: ThinkingPhase, pieces: list[str]) -> ReasoningSplit:
    parser = REASONING_FORMATS[name].parser(phase)
    parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return ReasoningSplit("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(("name", "phase", "text", "reasoning", "content"), CASES)
def test_outputs_are_split_wherever_they_are_cut(
    name: str, phase: ThinkingPhase, text: str, reasoning: str, content: str
) -> None:
    expected = (reasoning, content)
    assert split(name, phase, [text]) == expected
    assert split(name, phase, list(text)) == expected
    for cut in range(1, len(text)):
        assert split(name, phase, [text[:cut], text[cut:]]) == expected


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.sampled_from(ThinkingPhase),
    st.lists(st.sampled_from(PIECES), max_size=9),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_no_cut_changes_a_split(name: str, phase: ThinkingPhase, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    whole = split(name, phase, [text])
    assert split(name, phase, pieces) == split(name, phase, list(text)) == whole
    # Nothing is invented or reordered: what is left out are markers and white space.
    if name not in ("apriel", "cohere", "harmony", "think_answer"):
        for part in whole:
            assert part in text


def test_text_is_given_out_as_soon_as_it_is_sure() -> None:
    parser = REASONING_FORMATS["think"].parser(INSIDE)
    assert parser.push("abc ") == ("abc", "")
    assert parser.push("d</thi") == (" d", "")
    assert parser.push("nk>") == ("", "")
    assert parser.push("\nYes ") == ("", "Yes ")
    assert parser.push("no") == ("", "no")
