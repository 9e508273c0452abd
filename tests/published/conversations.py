"""Twelve conversations with what templates treat differently: roles, tools, calls, results, thinking, white space."""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Conversation(NamedTuple):
    """A conversation and how it is rendered.

    Args:
        messages: in OpenAI's form, with the arguments of calls as objects.
        has_tools: True if `TOOLS` are offered.
        begins: True if the prompt ends with the beginning of the assistant's next message.
        variables: variables of the template.
    """

    messages: list[dict[str, Any]]
    has_tools: bool = False
    begins: bool = True
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed


def function(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a tool."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a call; some templates accept ids of nine characters only."""
    return {"id": f"callid{number:03}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: str) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def assistant(content: str, *calls: dict[str, Any], reasoning: str | None = None) -> dict[str, Any]:
    """Return a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": f"callid{number:03}", "name": name, "content": content}


TOOLS: Final = [
    function(
        "get_weather",
        "Tells the weather of a city.",
        ["city"],
        city={"type": "string", "description": "name of the city"},
        days={"type": "integer", "description": "number of days"},
    ),
    function(
        "store",
        "Stores a record.",
        ["title"],
        title={"type": "string", "description": "title"},
        weight={"type": "number", "description": "weight in kg"},
        is_new={"type": "boolean", "description": "whether it is new"},
        tags={"type": "array", "description": "words", "items": {"type": "string", "description": "word"}},
        place={
            "type": "object",
            "description": "where it lies",
            "properties": {"row": {"type": "integer", "description": "row"}},
            "additionalProperties": {"type": "integer"},
        },
    ),
]
SYSTEM: Final = {"role": "system", "content": "You answer briefly."}
PARIS: Final = call(1, "get_weather", city="Paris", days=3)
ROME: Final = call(2, "get_weather", city="Rome")
RECORD: Final = call(
    3,
    "store",
    title='A "b" <c> & d\'s\n\té 你好 \\ {x}',
    weight=1.5,
    is_new=True,
    tags=["red", "x, y"],
    place={"row": 7},
)
CONVERSATIONS: Final[dict[str, Conversation]] = {
    "a question": Conversation([user("What is new?")]),
    "a system's text": Conversation([SYSTEM, user("What is new?")]),
    "turns": Conversation([SYSTEM, user("One?"), assistant("Two."), user("Three?"), assistant("Four.")], begins=False),
    "white space": Conversation([user("  é 你好\n\n<b>&amp;</b> {{ x }}\t "), assistant(" a\n"), user("\nend \n")]),
    "thinking in the content": Conversation(
        [user("One?"), assistant("<think>\nI add.\n</think>\n\nTwo."), user("Three?")]
    ),
    "thinking": Conversation(
        [user("One?"), assistant("Two.", reasoning="I add."), user("Three?"), assistant("Four.", reasoning="Again.")],
        begins=False,
    ),
    "no thinking": Conversation(
        [user("One?"), assistant("Two.", reasoning="I add."), user("Three?")],
        variables={"enable_thinking": False, "thinking": False},
    ),
    "tools": Conversation([SYSTEM, user("Rain?")], has_tools=True),
    "a call": Conversation(
        [user("Rain?"), assistant("", PARIS), result(1, "get_weather", '{"rain": false}')], has_tools=True
    ),
    "two calls": Conversation(
        [
            user("Rain?"),
            assistant("I look.", PARIS, ROME),
            result(1, "get_weather", "dry"),
            result(2, "get_weather", "wet"),
            assistant("Dry in Paris only."),
            user("Thanks."),
        ],
        has_tools=True,
    ),
    "each type": Conversation([SYSTEM, user("Store."), assistant("", RECORD)], has_tools=True, begins=False),
    "an agent": Conversation(
        [
            user("Rain?"),
            assistant("", PARIS, reasoning="I need the weather."),
            result(1, "get_weather", "dry"),
            assistant("", ROME, reasoning="And of Rome."),
            result(2, "get_weather", "wet"),
        ],
        has_tools=True,
        variables={"enable_thinking": True, "thinking": True},
    ),
}
