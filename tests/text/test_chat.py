"""Chat templates render as models expect, in a process with limits, and refuse what they cannot honour."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature, WorkerError
from quire.text.chat import messages as messages_module
from quire.text.chat.chat_template import ChatTemplate, require_chat_template
from quire.text.chat.messages import normalise_messages
from quire.text.chat.rendering import MAX_PROCESSES, Renderer
from quire.text.chat.template_environment import GLOBALS, TemplateState, make_environment

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


@pytest.fixture(scope="module")
def new(renderer: Renderer) -> partial[ChatTemplate]:
    """Makes templates without processes of their own."""
    return partial(ChatTemplate, renderer=renderer)


@pytest.fixture
def chatml(new: partial[ChatTemplate]) -> ChatTemplate:
    return new(CHATML, bos_token="<s>", eos_token="</s>")


def test_a_conversation_is_written_as_the_model_knows_it(chatml: ChatTemplate) -> None:
    conversation = [{"role": "system", "content": "Be <brief> & 'kind'."}, USER, {"role": "assistant", "content": "é"}]
    expected = "<|system|>Be <brief> & 'kind'.</s><|user|>hi</s><|assistant|>é</s>"
    assert chatml.render(conversation, add_generation_prompt=False) == expected
    assert chatml.render(conversation) == expected + "<|assistant|>"


def test_content_parts_and_the_developer_role_are_brought_into_form(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rendered = chatml.render([{"role": "developer", "content": parts}, USER], add_generation_prompt=False)
    assert rendered == "<|system|>one two</s><|user|>hi</s>"


def test_tool_calls_need_no_content_and_arguments_become_objects(chatml: ChatTemplate) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "<é>"}'}}
    conversation: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    conversation.append({"role": "tool", "content": "3", "tool_call_id": "c1"})
    rendered = chatml.render(conversation, add_generation_prompt=False)
    assert rendered == '<|user|>hi</s><|assistant|>add({"a": "<é>"})</s><|tool|>3</s>'


def test_tools_reach_the_template(chatml: ChatTemplate) -> None:
    rendered = chatml.render([USER], tools=[{"type": "function"}], add_generation_prompt=False)
    assert rendered == '<|user|>hi</s>[\n {\n  "type": "function"\n }\n]'


def test_whether_a_template_knows_tools_can_be_asked(chatml: ChatTemplate, new: partial[ChatTemplate]) -> None:
    assert chatml.supports_tools
    chatml.require_tools()
    assert not new("{{ messages }}").supports_tools
    assert new("{{ messages }}", tool_source="{{ tools }}").supports_tools
    broken = new("{% if tools %}")
    assert not broken.supports_tools
    with pytest.raises(RequestError, match="cannot be compiled"):
        broken.require_tools()


def test_without_tools_a_template_sees_none(new: partial[ChatTemplate]) -> None:
    template = new("{{ messages[0].content }}{% if tools is not none %}{{ tools | length }}{% else %} plain{% endif %}")
    assert template.render([USER]) == "hi plain"
    assert template.render([USER], tools=[{"type": "function"}]) == "hi1"


def test_variables_of_the_template_can_be_set_and_others_are_refused(
    chatml: ChatTemplate, new: partial[ChatTemplate]
) -> None:
    assert chatml.render([USER], variables={"style": "!"}).endswith("<|assistant|>!")
    with pytest.raises(UnsupportedFeature, match="enable_thinking"):
        chatml.render([USER], variables={"enable_thinking": False})
    with pytest.raises(UnsupportedFeature, match="tools"):
        new("{{ messages[0].content }}").render([USER], tools=[{"type": "function"}])


@pytest.mark.parametrize("name", ["eos_token", "raise_exception", "strftime_now", "range", "continue_final_message"])
def test_reserved_names_are_refused(chatml: ChatTemplate, name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        chatml.render([USER], variables={name: "x"})


def test_the_clock_is_passed_in(new: partial[ChatTemplate]) -> None:
    source = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    assert new(source, clock=lambda: datetime(2024, 2, 29)).render([USER]) == "29 Feb 2024 hi"


def test_loops_can_be_left(new: partial[ChatTemplate]) -> None:
    template = new("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}")
    assert template.render([USER, USER]) == "hi"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{{ undefined_name.field }}", "undefined_name"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_or_reaches_out_refuses_the_request(
    source: str, why: str, new: partial[ChatTemplate]
) -> None:
    with pytest.raises(RequestError, match=why):
        new(source).render([USER])


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
BOMBS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a string": (
        "{% set s = 'x' * 100000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "slices": "{% for part in 'abc' | slice(10 ** 9) %}{% endfor %}",
    "batches": "{% for part in 'abc' | batch(10 ** 9, 'x') %}{{ part | length }}{% endfor %}",
    "a string times a number": "{{ 'x' * 1000000000 }}",
    "a list times a number": "{{ 1000000000 * [0] }}",
    "a power": "{{ 9 ** 999999999 }}",
    "products": (
        "{% set ns = namespace(x=9 ** 9999) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "a tree of macros": (
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) | length }}"
    ),
    "joining with ~": DOUBLING.replace("OP", "~"),
    "joining with +": DOUBLING.replace("OP", "+"),
    "a format": "{{ '%2000000000d' % 1 }}",
    "a method that formats": "{{ '{:2000000000d}'.format(1) }}",
    "center": "{{ 'x' | center(2000000000) }}",
    "wordwrap": "{{ ('x ' * 200000) | wordwrap(1) | wordwrap(1) | length }}{% for i in range(99999) %}"
    "{% set x = ('x ' * 200000) | wordwrap(1) %}{% endfor %}",
    "a sum": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "a constant": "{{ 'x' | center(2000000000) | length }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "conditions": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "a long output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
}


# One of each resource: steps of loops, memory of values, depth of calls and of the parser, length of the output.
DEFAULT_BOMBS = (
    "loops in loops",
    "a string times a number",
    "a tree of macros",
    "joining with ~",
    "parentheses",
    "a long output",
)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=[] if name in DEFAULT_BOMBS else pytest.mark.slow)
        for name, source in BOMBS.items()
    ],
)
def test_a_bomb_refuses_the_request_within_its_limits(source: str) -> None:
    renderer = Renderer(timeout_s=0.5, memory_bytes=64 << 20)
    try:
        with pytest.raises(RequestError, match=r"takes more than|cannot be compiled|longer than"):
            ChatTemplate(source, renderer=renderer).render([USER])
        assert ChatTemplate("{{ messages[0].content }}", renderer=renderer).render([USER]) == "hi"
    finally:
        renderer.close()


def test_whether_a_bomb_knows_tools_can_be_asked() -> None:
    template = ChatTemplate(BOMBS["parentheses"] + "{{ tools }}", renderer=Renderer(memory_bytes=64 << 20))
    assert not template.supports_tools
    template.close()


def test_the_output_is_bounded() -> None:
    small = Renderer(max_chars=1000)
    with pytest.raises(RequestError, match="longer than 1000"):
        ChatTemplate("{% for i in range(1001) %}{{ 'x' }}{% endfor %}", renderer=small).render([USER])
    long = ChatTemplate("{% for i in range(990) %}x{% endfor %}{{ messages[0].content }}", renderer=small)
    assert long.render([USER]) == "x" * 990 + "hi"
    small.close()


def test_a_renderer_restarts_a_dead_process_unless_closed() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([USER]) == "hi"
    (process,) = template._renderer.processes.idle()
    os.kill(process.pid, signal.SIGKILL)
    while process.is_alive:
        pass
    assert template.render([USER]) == "hi"
    template.close()
    with pytest.raises(WorkerError, match="shut down"):
        template.render([USER])


def test_many_threads_may_render_at_once(new: partial[ChatTemplate], renderer: Renderer) -> None:
    template = new("{{ messages[0].content }}")
    texts = [f"{idx} " * 1000 for idx in range(200)]

    def render(text: str) -> str:
        return template.render([{"role": "user", "content": text}])

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(render, texts)) == texts
    assert 1 <= len(renderer.processes.idle()) <= MAX_PROCESSES


def test_the_process_loads_no_torch(new: partial[ChatTemplate], renderer: Renderer) -> None:
    new("{{ messages[0].content }}").render([USER])
    with open(f"/proc/{renderer.processes.idle()[0].pid}/maps", encoding="utf-8") as file:
        assert "torch" not in file.read()


def test_what_templates_find_beside_their_variables_is_reserved() -> None:
    assert make_environment(TemplateState()).globals.keys() == GLOBALS


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": [object()]}])
def test_a_variable_that_json_cannot_hold_is_refused(chatml: ChatTemplate, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="JSON can hold"):
        chatml.render([USER], variables={"style": value})
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(RequestError):
        chatml.render([USER], variables={"style": deep})


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\x00", "\u2028\n\r", "\U0001f600" * 1000])
def test_text_of_every_kind_comes_back_as_it_went(new: partial[ChatTemplate], text: str) -> None:
    assert new("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_the_input_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_INPUT_CHARS", 10)
    assert normalise_messages([{"role": "user", "content": "x" * 10}])
    with pytest.raises(InvalidParameter, match="at most 10 characters"):
        normalise_messages([{"role": "user", "content": "x" * 6}] * 2)
    with pytest.raises(InvalidParameter, match="from 1 to 4096 messages"):
        normalise_messages([{"role": "user", "content": ""}] * 4097)


def test_a_template_cannot_change_the_caller_s_messages(new: partial[ChatTemplate]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "unknown": 1}]
    new("{% set ns = namespace(m=messages[0]) %}{{ ns.m.content }}").render(messages)
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
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}" + " " * 10**6}}]}],
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
