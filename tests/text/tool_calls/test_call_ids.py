"""Ids of calls: random ones, and those that count the calls of a conversation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.server.generation.tool_calls import call_deltas
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tool_calls import FORMATS, CallRules, Function, SampleCalls, ToolUse
from tests.text.tool_calls.markup_examples import EXAMPLES

LOOK, LOOK_2 = Function("look", {"type": "object"}), Function("look-2", {"type": "object"})
# As Kimi K2's template, which writes the ids that come with calls and results.
BY_ID = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}: {{ m.content }};{% endif %}{% endfor %}"
)


def use_of(form: str, messages: object = ()) -> ToolUse:
    use = ToolUse((), CallRules(functions=[LOOK, LOOK_2]), FORMATS[form], False, False, ())
    return use.after(messages)


def called(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "look", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "rain"}


CONVERSATIONS: list[tuple[object, int]] = [
    ([], 0),
    ([{"role": "user", "content": "hi"}], 0),
    ([called("functions.look:0"), result("functions.look:0"), called("a", "b"), result("a"), result("b")], 3),
    # Refused when they are rendered.
    (None, 0),
    ("hi", 0),
    ([7, {"role": "assistant", "tool_calls": 7}, called("a")], 1),
]


@pytest.mark.parametrize(("messages", "earlier"), CONVERSATIONS)
def test_ids_of_kimi_k2_count_the_calls_of_the_conversation(messages: object, earlier: int) -> None:
    expected = [f"functions.look:{earlier}", f"functions.look-2:{earlier + 1}"]
    use = use_of("kimi_k2", messages)
    _, calls = SampleCalls(use).whole(EXAMPLES["kimi_k2-0"])
    assert [call.id for call in calls] == expected
    stream = SampleCalls(use)
    deltas = [one for char in EXAMPLES["kimi_k2-0"] for one in call_deltas(stream, char, is_finished=False)]
    assert [call["id"] for one in deltas for call in one["tool_calls"] if "id" in call] == expected


@pytest.mark.parametrize(
    ("form", "example", "pattern"),
    [("hermes", "hermes-0", "call_[0-9a-f]{24}"), ("mistral", "mistral-0", "[a-zA-Z0-9]{9}")],
)
def test_other_ids_are_random(form: str, example: str, pattern: str) -> None:
    _, calls = SampleCalls(use_of(form)).whole(EXAMPLES[example])
    assert all(re.fullmatch(pattern, call.id) for call in calls)
    assert calls[0].id != calls[1].id


def test_ids_that_clients_send_are_kept() -> None:
    template = ChatTemplate(BY_ID)
    try:
        messages = [called("functions.look:0", "mine"), result("mine"), result("functions.look:0")]
        rendered = template.render(messages)
    finally:
        template.close()
    assert rendered == "<functions.look:0><mine>## Return of mine: rain;## Return of functions.look:0: rain;"
