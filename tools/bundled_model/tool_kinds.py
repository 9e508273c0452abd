"""The kinds of tools that the bundled model learns to call: names, parameters, questions, results and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bundled_model import facts, words
from tools.bundled_model.stories import new_name, pick

Values = Mapping[str, Any]

CITIES = (
    *facts.CAPITALS.values(), "Hamburg", "Milan", "Naples", "Lyon", "Porto", "Seville", "Boston", "Chicago", "Denver",
    "Lima", "Quito", "Bogota", "Havana", "Nairobi", "Lagos", "Tunis", "Delhi", "Mumbai", "Seoul", "Osaka", "Kyoto",
    "Sydney", "Perth", "Prague", "Zurich", "Geneva", "Bergen", "Malmo", "Krakow", "Riga", "Tallinn", "Helsinki",
    "New York", "San Francisco", "Hong Kong", "Cape Town", "Munich", "Brussels", "Amsterdam", "Budapest", "Toronto",
)  # fmt: skip
ROOMS = ("kitchen", "bedroom", "garden", "bathroom", "hall", "cellar", "library", "attic", "office", "living room")
MESSAGES = (
    "the cake is ready", "I am late", "the train is late", "dinner is at six", "I am at home", "the book is here",
    "we meet at noon", "the dog is hungry", "I found the key", "the shop is closed", "it is raining", "I miss you",
    "the boat leaves soon", "the soup is hot", "I need help", "school is over",
)  # fmt: skip
CHORES = (
    "buy milk", "call Anna", "water the flowers", "feed the cat", "write a letter", "clean the lamp", "bake bread",
    "mend the roof", "read the map", "wash the cup", "find the key", "paint the door", "visit the baker",
)  # fmt: skip
WEATHER = {
    "rain": "It is raining in {city}", "sun": "The sun is shining in {city}", "snow": "It is snowing in {city}",
    "clouds": "There are clouds in {city}", "wind": "There is a strong wind in {city}", "fog": "There is fog in {city}",
    "rainy": "It is rainy in {city}", "sunny": "It is sunny in {city}", "snowy": "It is snowy in {city}",
    "cloudy": "It is cloudy in {city}", "windy": "It is windy in {city}", "stormy": "It is stormy in {city}",
}  # fmt: skip
WET = frozenset({"rain", "snow", "rainy", "snowy", "stormy"})
TRAITS = ("price", "age", "height", "weight", "owner", "size", "speed", "length", "address", "number", "rank", "code")


# Parameters that no call gives; the list of tools marks them as optional.
UNUSED = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "limit": {"type": "integer"},
    "format": {"type": "string"}, "verbose": {"type": "boolean"},
    "style": {"type": "string", "enum": ["short", "long"]},
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A parameter of a tool.

    Attributes:
        names: names of the parameter; a conversation has one of them.
        value: maker of values.
        type: type of the values in the schema.
        allowed: all allowed values, where the schema lists them.
    """

    names: tuple[str, ...]
    value: Callable[[random.Random], Any]
    type: str = "string"
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolKind:
    """A kind of tools.

    Attributes:
        names: names of the function; a conversation has one of them.
        descriptions: descriptions of the function.
        slots: parameters by their names in questions and answers.
        questions: questions that the tool answers.
        held_out: questions that only the evaluation asks.
        result: maker of the tool's result.
        answer: maker of the answer from the question, the values and the result.
        wish: the user's wish, as the model names it when it thinks.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: Mapping[str, Slot]
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    result: Callable[[random.Random, Values], str]
    answer: Callable[[str, Values, str], str]
    wish: str = field(default="")


def told(template: str) -> Callable[[str, Values, str], str]:
    """Return a maker of answers from a template with the values and `{result}`."""
    return lambda _, values, result: template.format(**values, result=result)


def city(rng: random.Random) -> str:
    """Return a city; some are invented, so that names are copied and not recalled."""
    return new_name(rng) if rng.random() < 0.2 else pick(rng, CITIES)


def person(rng: random.Random) -> str:
    """Return a first name; some are invented."""
    return new_name(rng) if rng.random() < 0.15 else pick(rng, (*words.GIRLS, *words.BOYS))


def title(rng: random.Random) -> str:
    """Return the title of a book."""
    noun = pick(rng, (*words.ANIMALS, *words.OBJECTS))
    if rng.random() < 0.3:
        return f"{person(rng)} and the {noun.title()}"
    return f"The {pick(rng, (*words.COLOURS, *words.SUBJECT_WORDS)).title()} {noun.title()}"


def number(rng: random.Random) -> int:
    """Return a number; small ones are the most likely."""
    chance = rng.random()
    return rng.randint(0, 20) if chance < 0.5 else rng.randint(21, 99) if chance < 0.85 else rng.randint(100, 999)


def clock(rng: random.Random) -> str:
    """Return a time of the day."""
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


def any_of(*values: str) -> Callable[[random.Random], str]:
    """Return a maker of one of some texts."""
    return lambda rng: pick(rng, values)


def counted(low: int, high: int) -> Callable[[random.Random], int]:
    """Return a maker of numbers from a range, both ends included."""
    return lambda rng: rng.randint(low, high)


def _weather(rng: random.Random, values: Values) -> str:
    del values
    sky, degrees, chance = pick(rng, tuple(WEATHER)), rng.randint(1, 35), rng.random()
    if chance < 0.6:
        return sky
    return f"{sky}, {degrees} degrees" if chance < 0.8 else f'{{"weather": "{sky}", "degrees": {degrees}}}'


def _weather_answer(question: str, values: Values, result: str) -> str:
    sky, *rest = "".join(char if char.isalnum() else " " for char in result.removeprefix('{"weather')).split()
    degrees = next((word for word in rest if word.isdigit()), None)
    said = WEATHER[sky].format(**values) + (f" at {degrees} degrees." if degrees else ".")
    if "umbrella" not in question:
        return said
    return f"Yes, take an umbrella. {said}" if sky in WET else f"No, you need no umbrella. {said}"


WEATHER_KIND = ToolKind(
    names=("get_weather", "weather", "get_current_weather"),
    descriptions=("The weather of a city.", "Get the weather in a city.", "Tells the weather of a place.",
                  "The weather today in a town."),
    slots={"city": Slot(("city", "location"), city)},
    questions=(
        "What is the weather in {city}?", "How is the weather in {city}?", "Do I need an umbrella in {city}?",
        "Is it raining in {city}?", "Will it rain in {city}?", "Is it cold in {city}?", "Is it sunny in {city} today?",
        "Tell me the weather in {city}.", "I am going to {city}. What is the weather there?", "Weather in {city}?",
        "I live in {city}. Do I need an umbrella?", "Does the sun shine in {city}?", "Give me the weather of {city}.",
        "Is there snow in {city}?", "What is the weather like in {city} today?", "I am in {city}. Will it rain today?",
    ),
    held_out=("Should I take an umbrella in {city}?", "How is the weather today in {city}?",
              "Please tell me how the weather is in {city}.", "Is it windy in {city}?"),
    result=_weather, answer=_weather_answer, wish="the weather in {city}",
)  # fmt: skip
TIME_KIND = ToolKind(
    names=("get_time", "tell_time", "clock"),
    descriptions=("The time in a city.", "Get the time of a place.", "Tells what time it is in a city."),
    slots={"city": Slot(("city", "place"), city)},
    questions=(
        "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?",
        "What is the time in {city}?", "Time in {city}?", "What time is it now in {city}?", "Is it night in {city}?",
        "I call a friend in {city}. What time is it there?", "What does the clock say in {city}?",
        "Give me the time of {city}.", "Do you know what time it is in {city}?",
    ),
    held_out=("Can you tell me the time in {city}?", "How late is it now in {city}?",
              "What is the time now in {city}?"),
    result=lambda rng, _: clock(rng), answer=told("It is {result} in {city}."), wish="the time in {city}",
)  # fmt: skip
LIVES_KIND = ToolKind(
    names=("where_lives", "find_animal", "get_home"),
    descriptions=("Where an animal lives.", "Find the home of an animal.", "Tells the place where an animal lives."),
    slots={"animal": Slot(("animal", "name"), any_of(*words.ANIMALS))},
    questions=(
        "Where does the {animal} live?", "Where is the home of the {animal}?", "Find the home of the {animal}.",
        "Tell me where the {animal} lives.", "Where can I find the {animal}?", "Look up where the {animal} lives.",
        "I look for the {animal}. Where is it?", "What is the home of the {animal}?", "Find the {animal}.",
    ),
    held_out=("Can you find out where the {animal} lives?", "In which place does the {animal} live?",
              "Please find the home of the {animal}."),
    result=lambda rng, _: " ".join(pick(rng, words.PLACES)), answer=told("The {animal} lives {result}."),
    wish="the home of the {animal}",
)  # fmt: skip
TIMER_KIND = ToolKind(
    names=("set_timer", "start_timer", "timer"),
    descriptions=("Set a timer.", "Starts a timer of some minutes.", "A timer that rings after some minutes."),
    slots={"minutes": Slot(("minutes", "duration"), counted(1, 90), "integer")},
    questions=(
        "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.",
        "Please set a timer to {minutes} minutes.", "I need a timer for {minutes} minutes.",
        "Ring in {minutes} minutes.",
        "The cake is done in {minutes} minutes. Set a timer.", "Can you set a timer for {minutes} minutes?",
        "Timer, {minutes} minutes.", "Count {minutes} minutes for me.",
    ),
    held_out=("Could you start a timer for {minutes} minutes?", "The bread takes {minutes} minutes. Start a timer.",
              "I want a timer of {minutes} minutes."),
    result=lambda rng, _: pick(rng, ("ok", "done", "the timer is set", "started")),
    answer=told("The timer is set for {minutes} minutes."), wish="a timer of {minutes} minutes",
)  # fmt: skip
MESSAGE_KIND = ToolKind(
    names=("send_message", "send", "message"),
    descriptions=("Send a message to a person.", "Sends a text to somebody.", "Write a message to a friend."),
    slots={"person": Slot(("to", "name"), person), "text": Slot(("text", "message"), any_of(*MESSAGES))},
    questions=(
        "Tell {person} that {text}.", "Send {person} the message that {text}.", "Write to {person} that {text}.",
        "Please tell {person} that {text}.", "Let {person} know that {text}.", "Send a message to {person}: {text}",
        "I want to tell {person} that {text}.", "Can you tell {person} that {text}?",
    ),
    held_out=("Please write to {person} that {text}.", "Can you let {person} know that {text}?"),
    result=lambda rng, _: pick(rng, ("sent", "ok", "done", "message sent")),
    answer=told("I have sent the message to {person}."), wish="to send a message to {person}",
)  # fmt: skip
LIGHT_KIND = ToolKind(
    names=("set_light", "switch_light", "light"),
    descriptions=("Turn the light of a room on or off.", "Switch a lamp.", "Changes the light in a room."),
    slots={"room": Slot(("room", "place"), any_of(*ROOMS)),
           "state": Slot(("state", "light"), any_of("on", "off"), allowed=("on", "off"))},
    questions=(
        "Turn {state} the light in the {room}.", "Turn the light in the {room} {state}.",
        "Switch {state} the lamp in the {room}.", "Please turn {state} the light in the {room}.",
        "Light {state} in the {room}.", "Can you turn {state} the lamp in the {room}?",
        "Switch the light in the {room} {state}.",
    ),
    held_out=("Please switch the lamp in the {room} {state}.", "Can you switch {state} the light in the {room}?"),
    result=lambda rng, _: pick(rng, ("ok", "done", "switched")),
    answer=told("The light in the {room} is {state}."), wish="the light in the {room} {state}",
)  # fmt: skip
TASK_KIND = ToolKind(
    names=("add_task", "remember", "add_note"),
    descriptions=("Add a task to the list.", "Writes a note.", "Remember something for the user."),
    slots={"task": Slot(("task", "text"), any_of(*CHORES))},
    questions=(
        "Remind me to {task}.", "I have to {task}. Remind me.", "Write down that I must {task}.", "Note: {task}",
        "Put this on my list: {task}", "Do not let me forget to {task}.", "Remember that I want to {task}.",
        "Please remind me to {task}.",
    ),
    held_out=("Can you remind me to {task}?", "Please note that I must {task}."),
    result=lambda rng, _: pick(rng, ("ok", "saved", "noted", "done")), answer=told("I will remind you to {task}."),
    wish="to remember to {task}",
)  # fmt: skip
DAY_KIND = ToolKind(
    names=("get_day", "today", "get_date"),
    descriptions=("The day of the week.", "Tells what day it is today.", "The date of today."),
    slots={},
    questions=(
        "What day is it today?", "Which day is it?", "What day is today?", "Tell me the day of the week.",
        "Do you know what day it is?", "Is it Sunday today?", "What day of the week is it?", "Which day do we have?",
    ),
    held_out=("Can you tell me what day it is?", "Which day of the week is it today?"),
    result=lambda rng, _: pick(rng, facts.DAY_NAMES), answer=told("Today is {result}."), wish="the day",
)  # fmt: skip


def arithmetic(sign: str, word: str, kind_of: str, names: tuple[str, ...]) -> ToolKind:
    """Return the kind of tools of one operation on two whole numbers.

    Args:
        sign: `+`, `-` or `*`.
        word: word between the numbers.
        kind_of: noun of the result.
        names: names of the function.
    """
    apply: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    }  # fmt: skip
    verb = {"+": "Add {a} and {b}.", "-": "Take {b} away from {a}.", "*": "Multiply {a} by {b}."}[sign]
    return ToolKind(
        names=names,
        descriptions=(f"The {kind_of} of two numbers.", f"Gives the {kind_of} of a and b.", f"Computes a {word} b."),
        slots={"a": Slot(("a", "x"), number, "integer"),
               "b": Slot(("b", "y"), number, "integer")},
        questions=(
            f"What is {{a}} {sign} {{b}}?", f"What is {{a}} {word} {{b}}?", f"How much is {{a}} {sign} {{b}}?",
            f"How much is {{a}} {word} {{b}}?", verb, f"{{a}} {sign} {{b}} = ?", f"Tell me what {{a}} {word} {{b}} is.",
            f"Please compute {{a}} {word} {{b}}.", f"Can you compute {{a}} {sign} {{b}}?",
        ),
        held_out=(f"Can you tell me what {{a}} {word} {{b}} is?", f"Please tell me how much {{a}} {word} {{b}} is.",
                  f"Compute {{a}} {sign} {{b}}."),
        result=lambda _, values: str(apply[sign](values["a"], values["b"])),
        answer=told(f"{{a}} {word} {{b}} is {{result}}."), wish=f"{{a}} {word} {{b}}",
    )  # fmt: skip


def looked_up(rng: random.Random) -> ToolKind:
    """Return a kind of tools with an invented purpose, so that names and parameters are read and not recalled.

    Args:
        rng: random number generator.
    """
    trait = pick(rng, TRAITS) if rng.random() < 0.7 else new_name(rng).lower()
    thing = pick(rng, ("house", "book", "ship", "car", "person", "horse", "town", "shop", "friend", "team", "king"))
    return ToolKind(
        names=(f"get_{trait}", f"find_{trait}", f"{trait}_of"),
        descriptions=(f"The {trait} of a {thing}.", f"Get the {trait} of a {thing}.", f"Looks up the {trait}.", ""),
        slots={"thing": Slot((thing, "name"), person if rng.random() < 0.6 else title)},
        questions=(
            f"What is the {trait} of {{thing}}?", f"Tell me the {trait} of {{thing}}.",
            f"Find the {trait} of {{thing}}.",
            f"Give me the {trait} of {{thing}}.", f"Look up the {trait} of {{thing}}.", f"{trait} of {{thing}}?",
            f"Which {trait} does {{thing}} have?", f"Do you know the {trait} of {{thing}}?",
        ),
        held_out=(f"Can you find the {trait} of {{thing}}?", f"I need the {trait} of {{thing}}."),
        result=lambda rng, _: str(number(rng)) if rng.random() < 0.6 else person(rng),
        answer=told(f"The {trait} of {{thing}} is {{result}}."), wish=f"the {trait} of {{thing}}",
    )  # fmt: skip


KINDS = (
    WEATHER_KIND, TIME_KIND, LIVES_KIND, TIMER_KIND, MESSAGE_KIND, LIGHT_KIND, TASK_KIND, DAY_KIND,
    arithmetic("+", "plus", "sum", ("add", "sum")),
    arithmetic("-", "minus", "difference", ("subtract", "minus")),
    arithmetic("*", "times", "product", ("multiply", "times")),
)  # fmt: skip
