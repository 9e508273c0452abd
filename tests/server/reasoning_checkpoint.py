"""Tiny models that think before they answer, each in one of the formats."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from quire.text.reasoning import REASONING_FORMATS
from quire.text.reasoning.tags import ReasoningTags
from tests.server import checkpoint
from tests.server.tool_checkpoint import CHOICES

THOUGHT, ANSWER = ["Hm", ", so", " it is"], ["Yes", "!"]
CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
TAGS = [form for form in REASONING_FORMATS.values() if isinstance(form, ReasoningTags)]
# What the models say behind the assistant's mark, token by token.
PATHS: dict[str, list[list[str]]] = {
    **{form.name: [["<|assistant|>", form.start, *THOUGHT, form.end, *ANSWER, "<|eos|>"]] for form in TAGS},
    "gemma4": [["<|assistant|>", "<|channel>", "thought\n", *THOUGHT, "<channel|>", *ANSWER, "<|eos|>"]],
    # A token has one follower, so only a budget brings this model to its final channel; it says the same there.
    "harmony": [["<|assistant|>", CHANNEL, "analysis", MESSAGE, *THOUGHT, END, START, "assistant", CHANNEL]],
}
# Qwen3's tags are no special tokens.
MARKS = {
    **{form.name: [form.start, form.end] for form in TAGS},
    "harmony": [CHANNEL, MESSAGE, END, START, "<|call|>", "<|constrain|>"],
}
# Ends of turns: without one, the end of a message would be one.
ENDS = {"harmony": ["<|return|>"]}
OPENING = {**{form.name: form.start for form in TAGS}, "harmony": CHANNEL}
CLOSED = {
    **{form.name: f"{form.start}{form.header}{form.end}" for form in TAGS},
    "think_answer": "<think></think><answer>",
    "harmony": f"{CHANNEL}final{MESSAGE}",
}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} as in <tool_call>JSON</tool_call>{{ eos_token }}"
    "{% endif %}"
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
