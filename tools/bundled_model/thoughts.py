"""Conversations in which the assistant thinks before it answers or calls a tool."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from tools.bundled_model import chats, talk
from tools.bundled_model.chats import ASKERS, Pair, ask, loosen
from tools.bundled_model.conversation import document_of
from tools.bundled_model.corpus import Document
from tools.bundled_model.stories import cast, pick, polish
from tools.bundled_model.story_chats import story_request
from tools.bundled_model.tool_chats import NO_TOOL, Message, ToolExchange, tool_chat

# The subject of a question, by the function that asks it.
SUBJECTS: Mapping[Callable[[random.Random], Pair], str] = {
    chats.about_colour: "the colour of something", chats.about_home: "the home of an animal",
    chats.about_legs: "a number of legs", chats.about_sound: "the sound of an animal",
    chats.about_food: "the food of an animal", chats.about_baby: "the name of a young animal",
    chats.about_opposite: "an opposite", chats.about_kind: "the meaning of a word",
    chats.about_animal: "some facts about an animal", chats.about_use: "the use of a thing",
    chats.about_making: "what a thing is made of", chats.about_job: "the work of people",
    chats.about_size: "the size of two animals", chats.about_ability: "what an animal can do",
    chats.about_capital: "the capital of a country", chats.about_order: "what comes before or after",
    chats.about_sum: "a small sum", chats.about_counting: "some counting", chats.about_group: "three things of a kind",
    chats.about_sentence: "a sentence about an animal", chats.about_record: "an animal as JSON",
    chats.plain: "a simple fact", chats.poem: "a poem",
}  # fmt: skip
# Their answers are long or free, so the thought does not say them.
FREE = frozenset({chats.about_sentence, chats.about_record, chats.poem, chats.about_counting, chats.about_animal})


def thought_of(rng: random.Random, asker: Callable[[random.Random], Pair], answer: str) -> str:
    """Return the thought before the answer of a question.

    Args:
        rng: random number generator.
        asker: function that made the question.
        answer: the answer.
    """
    if asker is chats.small_talk:
        return "The user wants to talk. I give a short and friendly answer."
    if asker is chats.unknown:
        return "I do not know much about this. I should say so."
    begun = f"The user asks for {SUBJECTS[asker]}."
    if asker in FREE:
        return f"{begun} I can write that."
    return f"{begun} I remember: {answer}" if rng.random() < 0.8 else f"{begun} I know this."


def thoughtful_chat(rng: random.Random) -> list[Message]:
    """Return a conversation without tools whose last message has a thought.

    Args:
        rng: random number generator.
    """
    turns = [(question, answer, "") for question, answer in (ask(rng) for _ in range(pick(rng, (0, 0, 0, 1, 2))))]
    if rng.random() < 0.15:
        question, answer = story_request(rng, cast(rng))
        about = re.search(r"about (.+?)[.?!,]*( please\.?)?$", question)
        thought = f"The user wants a story{f' about {about[1]}' if about else ''}. I will tell a short one."
    else:
        asker = pick(rng, ASKERS)
        question, answer = map(polish, asker(rng))
        question, thought = loosen(rng, question), thought_of(rng, asker, answer)
    turns.append((question, answer, thought))
    system = [{"role": "system", "content": pick(rng, talk.SYSTEMS)}] if rng.random() < 0.25 else []
    messages: list[Message] = [*system]
    for question, answer, thought in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if thought:
            messages[-1]["reasoning"] = thought
    return messages


def thought_of_tools(told: ToolExchange, message: Message) -> str:
    """Return the thought before a message of a conversation with tools.

    Args:
        told: exchange of the message.
        message: the call or the final answer.
    """
    if calls := message.get("tool_calls"):
        return f"The user wants {told.wish}. I can call {calls[0]['function']['name']}."
    if told.results:
        return f"The tool says {' and '.join(told.results)}. I can answer now."
    if told.answer == NO_TOOL:
        return f"The user wants {told.wish}. No tool can do that."
    return "I need no tool for this."


def thoughtful_tool_chat(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a conversation with tools whose last message, a call or an answer, has a thought.

    Args:
        rng: random number generator.
    """
    messages, tools, exchanges = tool_chat(rng)
    if exchanges[-1].calls and rng.random() < 0.5:
        del messages[-1 - len(exchanges[-1].results) :]
    messages[-1]["reasoning"] = thought_of_tools(exchanges[-1], messages[-1])
    return messages, [tool.definition for tool in tools]


def thinking_document(rng: random.Random) -> Document:
    """Return the document of a conversation with thinking.

    Args:
        rng: random number generator.
    """
    if rng.random() < 0.35:
        return document_of(*thoughtful_tool_chat(rng))
    return document_of(thoughtful_chat(rng))
