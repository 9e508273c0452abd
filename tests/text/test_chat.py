"""Chat templates render as models expect, in a sandbox, and refuse what they cannot honour."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.text import chat
from quire.text.chat import ChatTemplate, normalise_messages, require_chat_template

CHATML = """{%- for message in messages %}
    {%- if message['role'] == 'tool' and loop.first %}
        {{- raise_exception('a conversation cannot begin with a tool') }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- endif %}
    {%- generation %}{{- message['content'] + eos_token }}{% endgeneration %}
{%- endfor %}
{%- if tools %}{{- tools | tojson(indent=1) }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
{%- if style is defined %}{{- style }}{%- endif %}"""

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML, bos_token="<s>", eos_token="</s>")


def test_a_conversation_is_written_as_the_model_knows_it(chatml: ChatTemplate) -> None:
    conversation = [{"role": "system", "content": "Be <brief> & 'kind'."}, USER, {"role": "assistant", "content": "é"}]
    expected = "<|system|>Be <brief> & 'kind'.</s><|user|>hi</s><|assistant|>é</s>"
    assert chatml.render(conversation, add_generation_prompt=False) == expected
    assert chatml.render(conversation) == expected + "<|assistant|>"


def test_content_parts_and_the_developer_role_are_brought_into_form(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rendered = chatml.render([{"role": "developer", "content": parts}, USER], add_generation_prompt=False)
    assert rendered == "<|system|>one two</s><|user|>hi</s>"


def test_tool_calls_may_come_without_content_and_arguments_become_objects(chatml: ChatTemplate) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "<é>"}'}}
    conversation = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    conversation.append({"role": "tool", "content": "3", "tool_call_id": "c1"})
    rendered = chatml.render(conversation, add_generation_prompt=False)
    assert rendered == '<|user|>hi</s><|assistant|>add({"a": "<é>"})</s><|tool|>3</s>'


def test_tools_reach_the_template(chatml: ChatTemplate) -> None:
    rendered = chatml.render([USER], tools=[{"type": "function"}], add_generation_prompt=False)
    assert rendered == '<|user|>hi</s>[\n {\n  "type": "function"\n }\n]'


def test_whether_a_template_knows_tools_can_be_asked(chatml: ChatTemplate) -> None:
    assert chatml.knows_tools
    chatml.require_tools()
    assert not ChatTemplate("{{ messages }}").knows_tools
    assert ChatTemplate("{{ messages }}", tool_source="{{ tools }}").knows_tools
    broken = ChatTemplate("{% if tools %}")
    assert not broken.knows_tools
    with pytest.raises(RequestError, match="cannot be compiled"):
        broken.require_tools()


def test_without_tools_a_template_sees_none() -> None:
    template = ChatTemplate("{% if tools is not none %}{{ tools | length }}{% else %}plain{% endif %}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"type": "function"}]) == "1"


def test_variables_of_the_template_can_be_set_and_others_are_refused(chatml: ChatTemplate) -> None:
    assert chatml.render([USER], style="!").endswith("<|assistant|>!")
    with pytest.raises(UnsupportedFeature, match="enable_thinking"):
        chatml.render([USER], enable_thinking=False)
    with pytest.raises(UnsupportedFeature, match="tools"):
        ChatTemplate("{{ messages[0].content }}").render([USER], tools=[{"type": "function"}])


@pytest.mark.parametrize("name", ["eos_token", "raise_exception", "strftime_now", "range", "continue_final_message"])
def test_reserved_names_are_refused(chatml: ChatTemplate, name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        chatml.render([USER], **{name: "x"})


def test_the_clock_is_passed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 2, 29))
    assert template.render([USER]) == "29 Feb 2024"


def test_loops_can_be_left() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}")
    assert template.render([USER, USER]) == "hi"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{{ 'x' * 1000000000 }}", "too large"),
        ("{{ 1000000000 * [0] }}", "too large"),
        ("{{ 9 ** 999999999 }}", "powers"),
        ("{{ undefined_name.field }}", "undefined_name"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loops more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_template_that_fails_or_reaches_out_refuses_the_request(source: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        ChatTemplate(source).render([USER])


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARS", 1000)
    template = ChatTemplate("{% for i in range(1001) %}{{ 'x' }}{% endfor %}")
    with pytest.raises(RequestError, match="longer than 1000"):
        template.render([USER])
    assert ChatTemplate("{% for i in range(1000) %}{{ 'x' }}{% endfor %}").render([USER]) == "x" * 1000


def test_the_input_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_INPUT_CHARS", 10)
    assert normalise_messages([{"role": "user", "content": "x" * 10}])
    with pytest.raises(InvalidParameter, match="at most 10 characters"):
        normalise_messages([{"role": "user", "content": "x" * 6}] * 2)
    with pytest.raises(InvalidParameter, match="from 1 to 4096 messages"):
        normalise_messages([{"role": "user", "content": ""}] * 4097)


def test_a_template_cannot_change_the_caller_s_messages() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "unknown": 1}]
    ChatTemplate("{% set ns = namespace(m=messages[0]) %}{{ ns.m.content }}").render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "hi"}], "unknown": 1}]
    assert normalise_messages(messages) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "hi", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "hi", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        normalise_messages(messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        normalise_messages([message])
    assert caught.value.field == field


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        require_chat_template(None)
