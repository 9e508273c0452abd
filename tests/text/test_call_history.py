"""Earlier calls and their results in prompts, with templates of the shapes that models have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.text.chat.chat_template import ChatTemplate

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Röm", "deep": true}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
# `is none`, and arguments as a text, as in DeepSeek V3; V3.1 without the block of code.
DEEPSEEK = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ '<call>' + tool['type'] + '<sep>' + tool['function']['name'] "
    "+ '\\n```json\\n' + tool['function']['arguments'] + '\\n```<end>' }}{% endfor %}"
    "{% else %}{{ message['content'] }};{% endif %}{% endfor %}"
)
LFM2 = (
    "{% for message in messages %}<{{ message.role }}>{% set content = message['content'] %}"
    "{% if message['role'] == 'tool' %}"
    "{% set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}"
    "{% endif %}{{ content }}{% endfor %}"
)
HARMONY = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.thinking or message.content %}<analysis>{{ message.thinking or message.content }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}to=functions.{{ call.name }} {{ call.arguments | tojson }}"
    "{% else %}{{ message.content | tojson }}{% endif %}{% endfor %}"
)
XML = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>{{ value | tojson if value is mapping else value | string }}</parameter>{% endfor %}"
    "{% endfor %}{% endfor %}"
)
Render = Callable[..., str]


@pytest.fixture(scope="module")
def render() -> Iterator[Render]:
    made: list[ChatTemplate] = []

    def rendered(source: str, *messages: dict[str, Any]) -> str:
        made.append(made[0].with_source(source) if made else ChatTemplate(source))
        return made[-1].render(list(messages), add_generation_prompt=False)

    yield rendered
    made[0].close()


def assistant(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL], **more}


@pytest.mark.parametrize("content", [None, ""])
def test_arguments_are_a_text_where_a_template_takes_them_for_one(render: Render, content: str | None) -> None:
    expected = '<call>function<sep>look\n```json\n{"city": "Röm", "deep": true}\n```<end>rain;'
    assert render(DEEPSEEK, assistant(content), RESULT) == expected


def test_calls_that_a_template_leaves_out_are_written_into_the_content(render: Render) -> None:
    expected = (
        '<assistant><|tool_call_start|>[look(city="Röm", deep=True)]<|tool_call_end|>I look.'
        "<tool><|tool_response_start|>rain<|tool_response_end|>"
    )
    assert render(LFM2, assistant("I look."), RESULT) == expected
    # A template that writes them itself gets them as they are.
    assert "tool_call_start" not in render(LFM2 + "{% if messages[0].tool_calls %}!{% endif %}", assistant("I look."))


def test_reasoning_before_a_call_is_thinking(render: Render) -> None:
    call = 'to=functions.look {"city": "Röm", "deep": true}"rain"'
    assert render(HARMONY, assistant(reasoning="Why?"), RESULT) == f"<analysis>Why?{call}"
    assert render(HARMONY, assistant("I look.", reasoning="Why?"), RESULT) == f"<analysis>I look.{call}"
    assert render(HARMONY, assistant(), RESULT) == call


def test_arguments_are_an_object_too(render: Render) -> None:
    assert render(XML, assistant("So.")) == (
        "So.<function=look><parameter=city>Röm</parameter><parameter=deep>True</parameter>"
    )
    printed = "{% for call in messages[0].tool_calls %}{{ call.function.arguments }}{% endfor %}"
    assert render(printed, assistant()) == '{"city": "Röm", "deep": true}'
