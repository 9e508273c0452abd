"""Tiny models that think before they answer, each in one of the formats."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from tests.server import checkpoint
from tests.server.tool_checkpoint import CHOICES

THOUGHT, ANSWER = ["Hm", ", so", " it is"], ["Yes", "!"]
CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
# What the models say behind the assistant's mark, token by token.
PATHS: dict[str, list[list[str]]] = {
    "think": [["<|assistant|>", "<think>", *THOUGHT, "</think>", *ANSWER, "<|eos|>"]],
    "gemma4": [["<|assistant|>", "<|channel>", "thought\n", *THOUGHT, "<channel|>", *ANSWER, "<|eos|>"]],
    # A token has one follower, so only a budget brings this model to its final channel; it says the same there.
    "harmony": [["<|assistant|>", CHANNEL, "analysis", MESSAGE, *THOUGHT, END, START, "assistant", CHANNEL]],
}
# Qwen3's tags are no special tokens.
MARKS = {
    "think": ["<think>", "</think>"],
    "gemma4": ["<|channel>", "<channel|>"],
    "harmony": [CHANNEL, MESSAGE, END, START, "<|call|>", "<|constrain|>"],
}
# Ends of turns: without one, the end of a message would be one.
ENDS = {"harmony": ["<|return|>"]}
OPENING = {"think": "<think>", "gemma4": "<|channel>", "harmony": CHANNEL}
CLOSED = {"think": "<think></think>", "gemma4": "<|channel>thought\n<channel|>", "harmony": f"{CHANNEL}final{MESSAGE}"}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} as in <tool_call>{{ eos_token }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}|{{ message.reasoning }}]{% endif %}"
    "{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}CLOSED"
    "{% elif opens is defined %}OPENING{% endif %}{% endif %}{% if style is defined %}{{ style }}{% endif %}"
)


def save(folder: Path, form: str) -> Path:
    """Write a model that thinks, says "Yes!", and writes calls where a grammar wants them."""
    paths = [(0.5, path) for path in PATHS[form]]
    marks = [
        AddedToken(text, special=form != "think", normalized=False) for text in [*MARKS[form], *ENDS.get(form, ())]
    ]
    calls = [AddedToken(text, special=True, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    words = {token for _, tokens in [*paths, *CHOICES] for token in tokens}
    words |= {"final"}
    words -= {*MARKS[form], "<|eos|>", "<|assistant|>", *'"}Qx!'}
    plain = [AddedToken(text, special=False, normalized=False) for text in sorted(words)]
    template = TEMPLATE.replace("CLOSED", CLOSED[form]).replace("OPENING", OPENING[form])
    return checkpoint.save(folder, template, [*marks, *calls, *plain], [*paths, *CHOICES])
