"""The format of calls is found by what a template writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.rendering import Renderer
from quire.text.tool_calls import FORMATS, choose_format
from quire.text.tool_calls.formats import MarkupFormat

# Around all templates: tools, the user's message, and the beginning of the assistant's.
BEGIN = "{% if tools %}<s>{{ tools | tojson }}{% endif %}{% for message in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEXT = "<|{{ message.role }}|>{{ message.content }}"
CALLS = "{% for call in message.tool_calls %}{% set f = call.function %}"
WRITTEN = {
    "hermes": f"{CALLS}<tool_call>\n{{{{ f | tojson }}}}\n</tool_call>\n{{% endfor %}}",
    "llama3": f'{CALLS}{{"name": "{{{{ f.name }}}}", "parameters": {{{{ f.arguments | tojson }}}}}}'
    "{% if not loop.last %}; {% endif %}{% endfor %}<|eot_id|>",
    "mistral": "[TOOL_CALLS]{{ message.tool_calls | map(attribute='function') | list | tojson }}</s>",
    "mistral named": f"{CALLS}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}{{% endfor %}}",
    "mistral ids": f"{CALLS}[TOOL_CALLS]{{{{ f.name }}}}[CALL_ID]{{{{ call.id }}}}[ARGS]"
    "{{ f.arguments | tojson }}{% endfor %}",
    "qwen3_xml": f"{CALLS}<tool_call>\n<function={{{{ f.name }}}}>\n"
    "{% for key, value in f.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>\n{% endfor %}",
    "deepseek": f"<｜tool▁calls▁begin｜>{CALLS}<｜tool▁call▁begin｜>{{{{ f.name }}}}<｜tool▁sep｜>"
    "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek fenced": f"<｜tool▁calls▁begin｜>{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ f.name }}}}"
    "\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}<｜tool▁calls▁end｜>",
    "harmony": f"{CALLS}<|start|>assistant<|channel|>commentary to=functions.{{{{ f.name }}}} json<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% endfor %}",
}
MARKUPS = {
    "mistral named": "[ARGS]",
    "mistral ids": "[ARGS]",
    "deepseek fenced": "\n```json\n",
    "deepseek": "<｜tool▁sep｜>",
}


@pytest.fixture
def new(renderer: Renderer) -> Callable[[str], ChatTemplate]:
    """Makes a template that shares processes with the others."""
    return partial(ChatTemplate, bos_token="<s>", eos_token="</s>", renderer=renderer)


def writing(calls: str) -> str:
    """Return a template that writes the calls of messages."""
    either = f"{{% if message.tool_calls %}}{calls}{{% else %}}{{{{ message.content }}}}{{% endif %}}"
    return f"{BEGIN}<|{{{{ message.role }}}}|>{either}{END}"


@pytest.mark.parametrize("case", WRITTEN)
def test_a_format_is_found_by_the_calls_that_a_template_writes(case: str, new: Callable[[str], ChatTemplate]) -> None:
    form, reason = choose_format("auto", new(writing(WRITTEN[case])))
    assert form is not None, reason
    assert form.name == case.split()[0]
    assert reason == "in which the chat template writes calls"
    if isinstance(form, MarkupFormat):
        # The grammar has the markup that the template writes.
        assert form.markups[0].name_end == MARKUPS.get(case, form.markups[0].name_end)
        assert bool(form.markups[0].id_begin) == (case == "mistral ids")


@pytest.mark.parametrize("case", WRITTEN)
def test_words_of_another_format_do_not_mislead(case: str, new: Callable[[str], ChatTemplate]) -> None:
    words = "{# <tool_call> [TOOL_CALLS] #}{% if false %}<|python_tag|><function=<parameter=</think>{% endif %}"
    form, reason = choose_format("auto", new(words + writing(WRITTEN[case])))
    assert form is not None, reason
    assert form.name == case.split()[0]


@pytest.mark.parametrize(
    ("calls", "nearest"),
    [
        (f"{CALLS}<tool_call>{{{{ f.name }}}}={{{{ f.arguments | tojson }}}}</tool_call>{{% endfor %}}", "hermes"),
        (f"{CALLS}(({{{{ f.name }}}}: {{{{ f.arguments | tojson }}}})){{% endfor %}}", None),
    ],
)
def test_an_unknown_format_is_named_by_the_nearest_one(
    calls: str, nearest: str | None, new: Callable[[str], ChatTemplate]
) -> None:
    form, reason = choose_format("auto", new(writing(calls)))
    assert form is None
    why = "the chat template writes calls in a format that is not known"
    assert reason == (f"{why}; the nearest one is {nearest}" if nearest else why)


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("answer with <tool_call> and JSON </tool_call>", "hermes"),
        ("answer with <tool_call><function=name><parameter=key>value</parameter></function></tool_call>", "qwen3_xml"),
        ("answer with <tool_call> and </tool_call>", None),
        ("answer as you like", None),
    ],
)
def test_instructions_show_a_format(shown: str, name: str | None, new: Callable[[str], ChatTemplate]) -> None:
    form, reason = choose_format("auto", new(f"{{% if tools %}}{shown}{{% endif %}}{BEGIN}{TEXT}{END}"))
    assert (form and form.name) == name
    expected = "which the instructions of the chat template show"
    assert reason == (expected if name else "the chat template writes no calls, and its instructions show no format")
    # Without tools, a text is no instruction.
    assert choose_format("auto", new(f"{shown}{BEGIN}{TEXT}{END}")).form is None


def test_a_template_that_refuses_calls_shows_them_in_its_literals(new: Callable[[str], ChatTemplate]) -> None:
    refusing = "{% set _ = [].append(1) %}" + WRITTEN["deepseek"]
    form, reason = choose_format("auto", new(writing(refusing)))
    assert form is not None
    assert form.name == "deepseek"
    assert reason.startswith("whose marks the chat template has")


def test_definitions_of_tools_are_no_calls(new: Callable[[str], ChatTemplate]) -> None:
    # Nothing tells where the last message begins.
    form, reason = choose_format("auto", new("{{ tools | tojson }}{{ messages[-1].content }}<|assistant|>"))
    assert form is None
    assert reason == "the chat template writes no calls, and its instructions show no format"


def test_a_template_that_fails_with_tools_is_told_with_the_format_of_its_marks(
    new: Callable[[str], ChatTemplate],
) -> None:
    failing = "{% if tools %}{{ raise_exception('no') }}{% endif %}" + writing(WRITTEN["deepseek"])
    form, reason = choose_format("auto", new(failing))
    assert form is None
    assert reason == "the chat template cannot be rendered with tools; its marks are those of deepseek"


def test_a_template_that_fails_shows_nothing(new: Callable[[str], ChatTemplate]) -> None:
    assert choose_format("auto", new("{% broken")).form is None
    _, reason = choose_format("auto", new("{{ raise_exception('no') }}"))
    assert reason == "the chat template cannot be rendered with tools"


@pytest.mark.parametrize(
    "source", ["{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}", ""]
)
def test_a_hostile_template_costs_its_limits_and_no_more(source: str) -> None:
    with_limit = Renderer(timeout_s=0.2, memory_bytes=64 << 20)
    template = ChatTemplate(source + "{% set x = 'a' * 99999999 %}" * (not source), renderer=with_limit)
    assert choose_format("auto", template).form is None
    template.close()


def test_a_name_wins_over_the_template(new: Callable[[str], ChatTemplate]) -> None:
    template = new(writing(WRITTEN["mistral ids"]))
    for name, form in FORMATS.items():
        found = choose_format(name, template).form
        assert found is not None
        assert found.name == name
        assert name == "mistral" or found == form
    named = choose_format("mistral", template).form
    assert isinstance(named, MarkupFormat)
    assert named.markups[0].id_begin


def test_a_format_is_found_once(new: Callable[[str], ChatTemplate], monkeypatch: pytest.MonkeyPatch) -> None:
    template = new(writing(WRITTEN["hermes"]))
    found = choose_format("auto", template)
    monkeypatch.setattr(ChatTemplate, "try_all", None)
    assert choose_format("auto", template) is found


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()
