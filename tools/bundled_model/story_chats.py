"""Conversations in which the assistant tells stories or recalls earlier messages."""

from __future__ import annotations

import random

from tools.bundled_model import talk, words
from tools.bundled_model.chats import Pair, Turns, ask, loosen, several
from tools.bundled_model.stories import Cast, Slots, cast, new_name, pick, polish, tell

OPENERS = (
    "Tell me a story about {what}.", "Tell me a story about {what}.", "Tell me a story about {what}.",
    "Can you tell me a story about {what}?", "Write a story about {what}.", "Write a short story about {what}.",
    "I want to hear a story about {what}.", "Please tell me a short story about {what}.",
    "Do you know a story about {what}?", "A story about {what}, please.",
)  # fmt: skip
MORE = ("Tell me another story about {what}.", "Another story about {what}, please.", "Now tell me one about {what}.")
ANY = ("Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a story.",
       "I want to hear a story.", "Tell me another story.")  # fmt: skip


def story_request(rng: random.Random, chosen: Cast, openers: tuple[str, ...] = OPENERS) -> Pair:
    """Return a request for a story, and the story.

    Args:
        rng: random number generator.
        chosen: cast of the story.
        openers: beginnings of requests.

    Returns:
        The request and the story.
    """
    slots = Slots(rng, chosen)
    hero, uses, chance = chosen.hero, chosen.plot.uses, rng.random()
    if chance < 0.12:
        return loosen(rng, pick(rng, ANY)), tell(rng, chosen, brief=True, slots=slots)
    what = hero.first
    if chance < 0.35:
        what = slots.fill("x " + hero.first + " " + chosen.plot.ask)[2:]
    elif chance < 0.5 and "friend" in uses and " friend " not in chosen.friend.first:
        what = f"{hero.first} and {chosen.friend.first}"
    elif chance < 0.62 and "object" in uses:
        what = f"a {chosen.look} {chosen.thing}"
    elif chance < 0.7:
        what = f"{hero.first} {' '.join(chosen.place)}"
    elif chance < 0.76 and hero.known == hero.name:
        what = hero.name
    elif chance < 0.79:
        what = chosen.place[1]
    elif chance < 0.84 and hero.known == f"the {hero.first[2:]}":
        what = several(hero.later[0][4:])
    question = polish("x " + pick(rng, openers).format(what=what))[2:]
    return loosen(rng, question), tell(rng, chosen, brief=True, slots=slots)


def story_chat(rng: random.Random) -> Turns:
    """Return a request for a story, and a conversation about it.

    Args:
        rng: random number generator.
    """
    chosen = cast(rng)
    turns = [story_request(rng, chosen)]
    hero = chosen.hero
    if rng.random() < 0.3:
        questions = [
            ("Who is the story about?", f"The story is about {hero.first}."),
            ("Who was in the story?", f"{hero.first} and {chosen.friend.first} were in the story."),
            ("Where did it happen?", f"It happened {' '.join(chosen.place)}."),
        ]
        if "object" in chosen.plot.uses:
            questions.append((f"What did the {chosen.thing} look like?", f"It was a {chosen.look} {chosen.thing}."))
        text = turns[0][1]
        said = [pair for pair in questions if pair[0] != "Where did it happen?" or " ".join(chosen.place) in text]
        question, answer = said[rng.randrange(len(said))]
        if " friend " not in answer:
            turns.append((loosen(rng, question), polish(answer)))
    if rng.random() < 0.15:
        turns.append(story_request(rng, cast(rng), MORE))
    if rng.random() < 0.2:
        turns.append((pick(rng, ("Thank you!", "That was nice.", "What a nice story!")),
                      pick(rng, ("You are welcome!", "I am glad that you liked it."))))  # fmt: skip
    return turns


def memory_chat(rng: random.Random) -> Turns:
    """Return a conversation in which the user gives a fact and asks for it later.

    Args:
        rng: random number generator.
    """
    name = new_name(rng) if rng.random() < 0.15 else pick(rng, (*words.GIRLS, *words.BOYS))
    pet, animal, colour = pick(rng, words.PET_NAMES), pick(rng, words.ANIMALS), pick(rng, words.COLOURS[:8])
    food, thing = pick(rng, words.FOODS), pick(rng, words.OBJECTS)
    told, replies, question, answer = pick(rng, (
        ((f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}."),
         (f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"),
         ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"), f"Your name is {name}."),
        ((f"I have a {animal} named {pet}.", f"My {animal} is called {pet}."),
         (f"{pet} is a nice name for a {animal}.", f"A {animal} named {pet}! That sounds nice."),
         (f"What is the name of my {animal}?", f"What is my {animal} called?"), f"Your {animal} is called {pet}."),
        ((f"My favourite colour is {colour}.", f"I like the colour {colour}."),
         (f"{colour} is a beautiful colour.", f"I like {colour} too."),
         ("What is my favourite colour?", "Which colour do I like?"), f"Your favourite colour is {colour}."),
        ((f"I like to eat {food}.", f"My favourite food is {food}."), (f"{food} is very good.", "That sounds good."),
         ("What do I like to eat?", "What is my favourite food?"), f"You like to eat {food}."),
        ((f"I have a {colour} {thing}.", f"I found a {colour} {thing}."),
         (f"A {colour} {thing}! That sounds nice.", f"What a nice {thing}!"),
         (f"What colour is my {thing}?", f"Which colour is my {thing}?"), f"Your {thing} is {colour}."),
    ))  # fmt: skip
    turns = [(pick(rng, told), polish(pick(rng, replies)))]
    turns += [ask(rng) for _ in range(pick(rng, (0, 0, 1, 1, 2, 3)))]
    return [*turns, (pick(rng, question), answer)]


def chat(rng: random.Random) -> tuple[str | None, Turns]:
    """Return a conversation.

    Args:
        rng: random number generator.

    Returns:
        The system message, if there is one, and the turns.
    """
    system = pick(rng, talk.SYSTEMS) if rng.random() < 0.25 else None
    chance = rng.random()
    if chance < 0.3:
        return system, story_chat(rng)
    if chance < 0.42:
        turns = [(user, assistant) for user, assistant in memory_chat(rng)]
        return system, [(polish(user), assistant) for user, assistant in turns]
    return system, [ask(rng) for _ in range(pick(rng, (1, 1, 2, 2, 3, 4)))]


def long_chat(rng: random.Random, turns: int) -> tuple[str | None, Turns]:
    """Return a conversation of many turns with one or two stories.

    Args:
        rng: random number generator.
        turns: approximate number of turns.

    Returns:
        The system message, if there is one, and the turns.
    """
    told: Turns = []
    while len(told) < turns:
        told += [story_request(rng, cast(rng))] if rng.random() < 0.15 else chat(rng)[1]
    return None, told
