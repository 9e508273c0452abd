"""The format of thinking is found by what a template writes, begins, drops or shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.reasoning import REASONING_FORMATS, choose_reasoning_format

BEGIN = "{% for message in messages %}<|{{ message.role }}|>"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{{ message.content }}<|end|>"
WRITES, BEGINS, DROPS, SHOWS = (
    "in which the chat template writes thoughts",
    "with which the chat template begins answers",
    "which the chat template drops from earlier messages",
    "which the instructions of the chat template show",
)
THOUGHT = "{{ message.reasoning_content }}"
CASES = {
    "writes": (f"{BEGIN}{{% if message.reasoning_content %}}<think>\n{THOUGHT}\n</think>\n\n{{% endif %}}{PLAIN}{END}",
               "think", WRITES),
    "writes behind a beginning": (
        f"{BEGIN}{{% if message.role == 'assistant' %}}<think>{THOUGHT}</think>{{% endif %}}{PLAIN}{END}"
        "{% if add_generation_prompt %}<think>{% endif %}", "think", WRITES),
    "writes beside calls": (
        f"{BEGIN}{{% if message.tool_calls %}}<think>{THOUGHT}</think>{{{{ message.tool_calls[0].function.name }}}}"
        f"{{% endif %}}{PLAIN}{END}", "think", WRITES),
    "begins": (f"{BEGIN}{PLAIN}{END}{{% if add_generation_prompt %}}<think>\n{{% endif %}}", "think", BEGINS),
    "begins behind": (f"{BEGIN}{PLAIN}{END}{{% if enable_thinking is false %}}<think></think>{{% endif %}}",
                      "think", BEGINS),
    "drops": (f"{BEGIN}{{{{ message.content.split('</think>')[-1] }}}}<|end|>{END}", "think", DROPS),
    "shows": (f"Think between <think> and </think>.{BEGIN}{PLAIN}{END}", "think", SHOWS),
    "harmony": (
        "{% for message in messages %}<|start|>{{ message.role }}{% if message.thinking %}<|channel|>analysis"
        "<|message|>{{ message.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>"
        "{{ message.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}", "harmony", WRITES),
    "gemma4": (
        f"{BEGIN}{{% if message.reasoning %}}<|channel>thought\n{{{{ message.reasoning }}}}<channel|>"
        f"{{% endif %}}{PLAIN}{END}", "gemma4", WRITES),
    "none": (f"{BEGIN}{PLAIN}{END}", None, "the chat template shows none"),
    "words only": ("{# <think></think> #}{% if false %}<think></think>{% endif %}" + f"{BEGIN}{PLAIN}{END}",
                   None, "the chat template shows none"),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture
def new(renderer: Renderer) -> Callable[[str], ChatTemplate]:
    """Makes a template that shares processes with the others."""
    return partial(ChatTemplate, bos_token="<s>", eos_token="</s>", renderer=renderer)


@pytest.mark.parametrize("case", CASES)
def test_a_format_is_found_by_what_a_template_does(case: str, new: Callable[[str], ChatTemplate]) -> None:
    source, name, reason = CASES[case]
    found = choose_reasoning_format("auto", new(source))
    assert (found.form and found.form.name, found.reason) == (name, reason)


def test_a_template_that_refuses_thoughts_shows_them_in_its_literals(new: Callable[[str], ChatTemplate]) -> None:
    refusing = "{% if message.reasoning_content %}{% set _ = [].append('<think></think>') %}{% endif %}"
    found = choose_reasoning_format("auto", new(f"{BEGIN}{refusing}{PLAIN}{END}"))
    assert found.form is REASONING_FORMATS["think"]
    assert found.reason == "whose marks are in the chat template"


def test_a_name_wins_over_the_template(new: Callable[[str], ChatTemplate]) -> None:
    template = new(CASES["writes"][0])
    assert choose_reasoning_format("none", template).form is None
    assert choose_reasoning_format("gemma4", template).form is REASONING_FORMATS["gemma4"]
    assert choose_reasoning_format("auto", template).form is REASONING_FORMATS["think"]
