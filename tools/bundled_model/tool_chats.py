"""Conversations in which the assistant calls tools, reads their results and answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bundled_model import facts, talk
from tools.bundled_model.chats import (
    Pair,
    about_baby,
    about_capital,
    about_colour,
    about_kind,
    about_opposite,
    about_order,
    loosen,
    plain,
    poem,
    small_talk,
    unknown,
)
from tools.bundled_model.conversation import document_of
from tools.bundled_model.corpus import Document
from tools.bundled_model.stories import cast, pick, polish
from tools.bundled_model.story_chats import story_request
from tools.bundled_model.tool_kinds import CITIES, KINDS, UNUSED, WEATHER_KIND, Slot, ToolKind, Values, looked_up

Message = dict[str, Any]
# Questions about these are answered without a tool, whatever tools there are.
PLAIN_ASKERS: tuple[Callable[[random.Random], Pair], ...] = (
    about_baby, about_capital, about_colour, about_kind, about_opposite, about_order, plain, poem,
    small_talk, small_talk, small_talk, small_talk, unknown,
)  # fmt: skip
# Small talk about these would be answered by a tool that a conversation may have.
TOOLS_KNOW = re.compile(r"weather|rain|time|date|day is|clock")
ERRORS = ("not found", "no such name", "the tool does not answer", "try again later")
NO_TOOL = "I am sorry, I have no tool for that."


@dataclass(frozen=True)
class ExampleTool:
    """A tool of one conversation.

    Attributes:
        kind: kind of the tool.
        name: name of the function.
        parameters: name of each parameter by the name of its slot.
        description: description of the function; "" for none.
        unused: name of an optional parameter that no call gives; "" for none.
        is_strict: True where the definition says which parameters are required.
    """

    kind: ToolKind
    name: str
    parameters: dict[str, str]
    description: str
    unused: str
    is_strict: bool

    @property
    def definition(self) -> dict[str, Any]:
        """The definition in OpenAI's form."""
        properties = {self.parameters[slot]: _schema(self.kind.slots[slot]) for slot in self.parameters}
        parameters = {"type": "object", "properties": properties}
        if self.is_strict:
            parameters["required"] = list(properties)
        if self.unused:
            parameters["properties"] = {**properties, self.unused: UNUSED[self.unused]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, values: Values) -> dict[str, Any]:
        """Return the call with some values in OpenAI's form, with the arguments as an object."""
        arguments = {self.parameters[slot]: value for slot, value in values.items()}
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def _schema(slot: Slot) -> dict[str, Any]:
    return {"type": slot.type} | ({"enum": list(slot.allowed)} if slot.allowed else {})


def new_tool(rng: random.Random, kind: ToolKind) -> ExampleTool:
    """Return a tool of a kind, with names and a description.

    Args:
        rng: random number generator.
        kind: kind of the tool.
    """
    parameters = {slot: pick(rng, of.names) for slot, of in kind.slots.items()}
    described = pick(rng, kind.descriptions) if rng.random() < 0.85 else ""
    unused = pick(rng, tuple(UNUSED)) if rng.random() < 0.12 else ""
    return ExampleTool(kind, pick(rng, kind.names), parameters, described, unused, is_strict=rng.random() < 0.9)


def some_tools(rng: random.Random, count: int) -> list[ExampleTool]:
    """Return tools of different kinds, in random order.

    Args:
        rng: random number generator.
        count: number of tools.
    """
    kinds = rng.sample(KINDS, count)
    if rng.random() < 0.25:
        kinds[0] = looked_up(rng)
    rng.shuffle(kinds)
    # Kinds share a few names.
    tools = {tool.name: tool for tool in (new_tool(rng, kind) for kind in kinds)}
    return list(tools.values())


@dataclass(frozen=True)
class ToolExchange:
    """A question, with the call that it needs, the result and the answer.

    Attributes:
        question: the user's message.
        calls: calls in OpenAI's form.
        results: result of each call.
        answer: the assistant's final message.
        wish: the user's wish.
    """

    question: str
    calls: list[dict[str, Any]]
    results: list[str]
    answer: str
    wish: str

    def messages(self) -> list[Message]:
        """Return the messages: question, calls, results, answer."""
        called = [{"role": "assistant", "content": "", "tool_calls": self.calls}] if self.calls else []
        answered = [{"role": "tool", "content": result} for result in self.results]
        return [{"role": "user", "content": self.question}, *called, *answered,
                {"role": "assistant", "content": self.answer}]  # fmt: skip


def exchange(rng: random.Random, tool: ExampleTool, *, is_held_out: bool = False) -> ToolExchange:
    """Return a question that a tool answers.

    Args:
        rng: random number generator.
        tool: the tool.
        is_held_out: True for phrasings that the training does not have.
    """
    kind = tool.kind
    values = {slot: of.value(rng) for slot, of in kind.slots.items()}
    said = {slot: _in_words(rng, value) for slot, value in values.items()}
    question = pick(rng, kind.held_out if is_held_out else kind.questions).format(**said)
    question = polish(question)
    if not is_held_out:
        question = loosen(rng, question.replace("What is", "What's") if rng.random() < 0.15 else question)
    result = kind.result(rng, values)
    wish = kind.wish.format(**values)
    if rng.random() < 0.05:
        result = f"error: {pick(rng, ERRORS)}"
        return ToolExchange(
            question, [tool.call(values)], [result], f"I am sorry, that did not work: {result[7:]}.", wish
        )
    return ToolExchange(question, [tool.call(values)], [result], polish(kind.answer(question, values, result)), wish)


def _in_words(rng: random.Random, value: Any) -> Any:
    is_small = isinstance(value, int) and value < len(facts.NUMBERS)
    return facts.NUMBERS[value] if is_small and rng.random() < 0.2 else value


def two_cities(rng: random.Random, tool: ExampleTool) -> ToolExchange:
    """Return a question about the weather in two cities, with two calls.

    Args:
        rng: random number generator.
        tool: tool that tells the weather.
    """
    cities = rng.sample(CITIES, 2)
    said = " and ".join(cities)
    question = pick(rng, (f"What is the weather in {said}?", f"How is the weather in {said}?",
                          f"Tell me the weather in {said}.", f"Weather in {said}?"))  # fmt: skip
    results = [WEATHER_KIND.result(rng, {}) for _ in cities]
    answers = [WEATHER_KIND.answer(question, {"city": city}, sky) for city, sky in zip(cities, results, strict=True)]
    calls = [tool.call({"city": city}) for city in cities]
    return ToolExchange(loosen(rng, question), calls, results, " ".join(answers), f"the weather in {said}")


def plain_exchange(rng: random.Random, tools: Sequence[ExampleTool]) -> ToolExchange:
    """Return a question that needs no tool, or one that no tool of the list answers.

    Args:
        rng: random number generator.
        tools: tools of the conversation.
    """
    chance = rng.random()
    if chance < 0.2:
        listed = [tool.kind for tool in tools]
        kind = pick(rng, tuple(one for one in KINDS[:7] if one not in listed))
        if kind.names[0] != "where_lives":
            asked = exchange(rng, new_tool(rng, kind))
            return ToolExchange(asked.question, [], [], NO_TOOL, asked.wish)
    if chance < 0.3:
        question, story = story_request(rng, cast(rng))
        return ToolExchange(question, [], [], story, "a story")
    question, answer = pick(rng, PLAIN_ASKERS)(rng)
    while TOOLS_KNOW.search(question):
        question, answer = pick(rng, PLAIN_ASKERS)(rng)
    return ToolExchange(loosen(rng, polish(question)), [], [], polish(answer), "")


def tool_chat(rng: random.Random) -> tuple[list[Message], list[ExampleTool], list[ToolExchange]]:
    """Return a conversation with tools.

    Args:
        rng: random number generator.

    Returns:
        The messages, the tools and the exchanges of which the messages consist.
    """
    tools = some_tools(rng, pick(rng, (1, 1, 2, 2, 3, 4)))
    exchanges = []
    for _ in range(pick(rng, (1, 1, 2, 3))):
        if rng.random() < 0.25:
            exchanges.append(plain_exchange(rng, tools))
            continue
        tool = pick(rng, tuple(tools))
        is_double = tool.kind is WEATHER_KIND and rng.random() < 0.2
        exchanges.append(two_cities(rng, tool) if is_double else exchange(rng, tool))
    system = [{"role": "system", "content": pick(rng, talk.SYSTEMS)}] if rng.random() < 0.25 else []
    return [*system, *(message for one in exchanges for message in one.messages())], tools, exchanges


def tool_document(rng: random.Random) -> Document:
    """Return the document of a conversation with tools.

    Args:
        rng: random number generator.
    """
    messages, tools, _ = tool_chat(rng)
    return document_of(messages, [tool.definition for tool in tools])
