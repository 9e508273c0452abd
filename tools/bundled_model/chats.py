"""Small conversations between a user and the assistant."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tools.bundled_model import facts, talk, words
from tools.bundled_model.stories import pick, polish

Turns = list[tuple[str, str]]
Pair = tuple[str, str]


def several(noun: str) -> str:
    """Return the plural of an animal.

    Args:
        noun: the singular.
    """
    odd = {
        "fish": "fish", "sheep": "sheep", "mouse": "mice", "wolf": "wolves", "fox": "foxes", "deer": "deer",
        "goose": "geese", "butterfly": "butterflies", "fly": "flies", "person": "people",
        "fisherman": "fishermen", "postman": "postmen", "woman": "women", "man": "men", "witch": "witches",
        "ostrich": "ostriches", "pony": "ponies", "calf": "calves", "fairy": "fairies", "firefly": "fireflies",
        "octopus": "octopuses", "moose": "moose", "buffalo": "buffaloes", "puppy": "puppies",
    }  # fmt: skip
    return odd.get(noun, noun + "s")


def about_colour(rng: random.Random) -> Pair:
    """Return a question about the colour of something, and its answer."""
    thing = pick(rng, tuple(facts.COLOUR))
    colour = facts.COLOUR[thing]
    word = pick(rng, ("colour", "colour", "color"))
    if rng.random() < 0.25:
        guess = pick(rng, (colour, "blue", "green", "pink", "black", "yellow"))
        question = f"Is {thing} {guess}?"
        return question, f"Yes, {thing} is {colour}." if guess == colour else f"No, {thing} is {colour}."
    question = pick(rng, (
        f"What {word} is {thing}?", f"What is the {word} of {thing}?", f"Which {word} has {thing}?",
        f"Tell me the {word} of {thing}.", f"What {word} does {thing} have?",
    ))  # fmt: skip
    return question, pick(rng, (f"{thing} is {colour}.", f"The colour of {thing} is {colour}."))


def about_home(rng: random.Random) -> Pair:
    """Return a question about the home of an animal, and its answer."""
    noun = pick(rng, tuple(facts.LIVES))
    where = facts.LIVES[noun]
    if rng.random() < 0.35 and " in a " not in f" {where}" and "its" not in where:
        many = several(noun)
        return pick(rng, (f"Where do {many} live?", f"Where can I find {many}?")), f"{many} live {where}."
    question = pick(
        rng, (f"Where does a {noun} live?", f"Where does the {noun} live?", f"What is the home of a {noun}?")
    )
    return question, f"A {noun} lives {where}."


def about_legs(rng: random.Random) -> Pair:
    """Return a question about the number of an animal's legs, and its answer."""
    noun = pick(rng, tuple(facts.LEGS))
    number = facts.LEGS[noun]
    question = pick(rng, (
        f"How many legs has a {noun}?", f"How many legs does a {noun} have?", f"How many legs do {several(noun)} have?",
        f"Tell me how many legs a {noun} has.",
    ))  # fmt: skip
    return question, f"A {noun} has {number} legs."


def about_sound(rng: random.Random) -> Pair:
    """Return a question about the sound of an animal, and its answer."""
    noun = pick(rng, tuple(facts.SOUND))
    sound = facts.SOUND[noun]
    if rng.random() < 0.2:
        return f'Which animal says "{sound}"?', f'A {noun} says "{sound}".'
    question = pick(rng, (
        f"What sound does a {noun} make?", f"What does a {noun} say?", f"What does the {noun} say?",
        f"Which sound does a {noun} make?", f"How does a {noun} sound?",
    ))  # fmt: skip
    return question, pick(rng, (f'A {noun} says "{sound}".', f'A {noun} goes "{sound}".'))


def about_food(rng: random.Random) -> Pair:
    """Return a question about the food of an animal, and its answer."""
    noun = pick(rng, tuple(facts.EATS))
    food = facts.EATS[noun]
    if rng.random() < 0.3:
        return f"What do {several(noun)} eat?", f"{several(noun)} eat {food}."
    question = pick(
        rng, (f"What does a {noun} eat?", f"What does a {noun} like to eat?", f"What is the food of a {noun}?")
    )
    return question, f"A {noun} eats {food}."


def about_baby(rng: random.Random) -> Pair:
    """Return a question about the name of a young animal, and its answer."""
    noun = pick(rng, tuple(facts.BABY))
    young = facts.BABY[noun]
    question = pick(rng, (
        f"What is a baby {noun} called?", f"What do you call a young {noun}?", f"What is the name of a baby {noun}?",
    ))  # fmt: skip
    return question, pick(rng, (f"A baby {noun} is called a {young}.", f"A young {noun} is called a {young}."))


def about_opposite(rng: random.Random) -> Pair:
    """Return a question about the opposite of a word, and its answer."""
    one, other = pick(rng, facts.OPPOSITES)
    if rng.random() < 0.5 and "light" not in (one, other):
        one, other = other, one
    question = pick(rng, (
        f"What is the opposite of {one}?", f"What's the opposite of {one}?", f"Tell me the opposite of {one}.",
        f"Give me the opposite of {one}.", f"Which word is the opposite of {one}?",
    ))  # fmt: skip
    return question, f"The opposite of {one} is {other}."


def about_kind(rng: random.Random) -> Pair:
    """Return a question about the kind of a thing, and its answer."""
    noun = pick(rng, tuple(facts.IS_A))
    question = pick(rng, (
        f"What is a {noun}?", f"What's a {noun}?", f"Do you know what a {noun} is?", f"What does the word {noun} mean?",
        f"Explain what a {noun} is.",
    ))  # fmt: skip
    return question, f"A {noun} is {facts.IS_A[noun]}."


def about_animal(rng: random.Random) -> Pair:
    """Return a request for all facts about an animal, and its answer."""
    noun = pick(rng, tuple(name for name in facts.IS_A if name in facts.EATS or name in facts.LIVES))
    told = [f"A {noun} is {facts.IS_A[noun]}."]
    if noun in facts.LIVES:
        told.append(f"It lives {facts.LIVES[noun]}.")
    if noun in facts.EATS:
        told.append(f"It eats {facts.EATS[noun]}.")
    question = pick(rng, (f"Tell me about the {noun}.", f"Describe a {noun}.",
     f"Tell me something about {several(noun)}.",
                          f"What do you know about {several(noun)}?"))  # fmt: skip
    return question, " ".join(told)


def about_use(rng: random.Random) -> Pair:
    """Return a question about the use of a thing, and its answer."""
    thing = pick(rng, tuple(facts.USED_FOR))
    use = facts.USED_FOR[thing]
    question = pick(
        rng, (f"What do you do with {thing}?", f"What can I do with {thing}?", f"Why do people use {thing}?")
    )
    return question, pick(rng, (f"You can use {thing} to {use}.", f"People use {thing} to {use}."))


def about_making(rng: random.Random) -> Pair:
    """Return a question about the material of a thing, and its answer."""
    thing = pick(rng, tuple(facts.MADE_OF))
    question = pick(rng, (f"What is {thing} made of?", f"What is {thing} made from?"))
    return question, f"{thing} is made of {facts.MADE_OF[thing]}."


def about_job(rng: random.Random) -> Pair:
    """Return a question about the work of a trade, and its answer."""
    noun = pick(rng, tuple(facts.JOBS))
    question = pick(rng, (f"What does a {noun} do?", f"What is the job of a {noun}?", f"What is the work of a {noun}?"))
    return question, f"A {noun} {facts.JOBS[noun]}."


def about_size(rng: random.Random) -> Pair:
    """Return a question about the bigger one of two animals, and its answer."""
    low, high = sorted(rng.sample(range(len(facts.SIZES)), 2))
    small, big = facts.SIZES[low], facts.SIZES[high]
    left, right = rng.sample((small, big), 2)
    if rng.random() < 0.7:
        question = pick(rng, (f"Which is bigger, a {left} or a {right}?", f"What is bigger, a {left} or a {right}?",
                              f"Is a {left} bigger than a {right}?"))  # fmt: skip
        if question.startswith("Is"):
            start = "Yes" if left == big else "No"
            return question, f"{start}, a {big} is bigger than a {small}."
        return question, f"A {big} is bigger than a {small}."
    return f"Which is smaller, a {left} or a {right}?", f"A {small} is smaller than a {big}."


def about_ability(rng: random.Random) -> Pair:
    """Return a question about an ability of an animal, and its answer."""
    noun = pick(rng, tuple(facts.CAN))
    able, unable = facts.CAN[noun]
    if rng.random() < 0.5:
        return f"Can a {noun} {able}?", f"Yes, a {noun} can {able}."
    return f"Can a {noun} {unable}?", f"No, a {noun} cannot {unable}, but it can {able}."


def about_capital(rng: random.Random) -> Pair:
    """Return a question about the capital of a country, and its answer."""
    land = pick(rng, tuple(facts.CAPITALS))
    question = pick(rng, (f"What is the capital of {land}?", f"What's the capital of {land}?",
                          f"Which city is the capital of {land}?"))  # fmt: skip
    return question, f"The capital of {land} is {facts.CAPITALS[land]}."


def about_order(rng: random.Random) -> Pair:
    """Return a question about the day, month or season before or after another, and its answer."""
    row = pick(rng, (facts.DAY_NAMES, facts.MONTHS, facts.SEASONS))
    place = rng.randrange(len(row))
    one, after = row[place], row[(place + 1) % len(row)]
    kind = {7: "day", 12: "month", 4: "season"}[len(row)]
    if rng.random() < 0.65:
        question = pick(
            rng, (f"What comes after {one}?", f"Which {kind} comes after {one}?", f"What {kind} is after {one}?")
        )
        return question, f"{after} comes after {one}."
    return f"Which {kind} comes before {after}?", f"{one} comes before {after}."


def about_sum(rng: random.Random) -> Pair:
    """Return a question about a small sum or difference, and its answer."""
    first, second = rng.randint(0, 10), rng.randint(0, 10)
    sign, word, result = "+", "plus", first + second
    if rng.random() < 0.3:
        first, second = max(first, second), min(first, second)
        sign, word, result = "-", "minus", first - second
    names = facts.NUMBERS
    in_digits = pick(
        rng,
        (f"What is {first} {sign} {second}?", f"{first} {sign} {second} = ?", f"How much is {first} {sign} {second}?"),
    )
    in_words = pick(
        rng, (f"What is {names[first]} {word} {names[second]}?", f"How much is {names[first]} {word} {names[second]}?")
    )
    question = in_digits if rng.random() < 0.4 else in_words
    return question, f"{names[first]} {word} {names[second]} is {names[result]}."


def about_counting(rng: random.Random) -> Pair:
    """Return a request to count, and its answer."""
    last = rng.randint(3, 12)
    name = pick(rng, (facts.NUMBERS[last], str(last)))
    question = pick(rng, (f"Count to {name}.", f"Can you count to {name}?", f"Please count from one to {name}."))
    return question, ", ".join(facts.NUMBERS[1:last]) + f" and {facts.NUMBERS[last]}."


def about_group(rng: random.Random) -> Pair:
    """Return a request for three things of a kind, and its answer."""
    kind = pick(rng, tuple(facts.GROUPS))
    one, two, three = rng.sample(facts.GROUPS[kind], 3)
    question = pick(
        rng, (f"Name three {kind}.", f"Tell me three {kind}.", f"List three {kind}.", f"Can you name three {kind}?")
    )
    return question, f"Three {kind} are {one}, {two} and {three}."


def about_sentence(rng: random.Random) -> Pair:
    """Return a request for a sentence about an animal, and its answer."""
    noun, word = pick(rng, words.ANIMALS), pick(rng, words.SUBJECT_WORDS)
    thing, (near, place) = f"a {pick(rng, words.COLOURS)} {pick(rng, words.OBJECTS)}", pick(rng, words.PLACES)
    question = pick(rng, (f"Write a sentence about a {noun}.", f"Make a sentence with the word {noun}.",
                          f"Write one sentence about a {noun}."))  # fmt: skip
    return question, pick(rng, (
        f"The {word} {noun} found {thing} {near} {place}.", f"A {word} {noun} was sleeping {near} {place}.",
        f"The {noun} looked at {thing} and smiled.", f"Every day, the {noun} went to {place}.",
        f"A {noun} and a {pick(rng, words.MEN)} were playing {near} {place}.",
    ))  # fmt: skip


def about_record(rng: random.Random) -> Pair:
    """Return a request for the facts about an animal as JSON, and its answer."""
    noun = pick(rng, tuple(name for name in facts.LEGS if name in facts.EATS or name in facts.SOUND))
    record: dict[str, object] = {"animal": noun, "legs": facts.NUMBERS.index(facts.LEGS[noun].replace("no", "zero"))}
    for key, table in (("sound", facts.SOUND), ("eats", facts.EATS), ("lives", facts.LIVES)):
        if noun in table:
            record[key] = table[noun]
    question = pick(
        rng, (f"Describe a {noun} as JSON.", f"Give me a {noun} as JSON.", f"Write a JSON object about a {noun}.")
    )
    return question, json.dumps(record)


def plain(rng: random.Random) -> Pair:
    """Return one of the single questions, and its answer."""
    return pick(rng, facts.PLAIN)


def small_talk(rng: random.Random) -> Pair:
    """Return a greeting, a request for a joke, or the like, and its answer."""
    said, answers = pick(rng, talk.TALK)
    return pick(rng, said), pick(rng, answers)


def unknown(rng: random.Random) -> Pair:
    """Return a question that the assistant cannot answer, and its answer."""
    question = pick(rng, talk.UNKNOWN).format(
        land=pick(rng, talk.LANDS), thing=pick(rng, talk.THINGS), science=pick(rng, talk.SCIENCE),
        number=rng.randint(21, 9999), year=rng.randint(1200, 2020),
    )  # fmt: skip
    return question, pick(rng, talk.SORRY)


def poem(rng: random.Random) -> Pair:
    """Return a request for a poem of two lines, and its answer."""
    noun = pick(rng, talk.POEM_NOUNS)
    question = pick(rng, (f"Write a poem about the {noun}.", f"Write a short poem about the {noun}.",
                          f"Can you write a poem about the {noun}?", f"Make a rhyme about the {noun}."))  # fmt: skip
    return question, pick(rng, talk.POEMS).format(noun=noun)


ASKERS: tuple[Callable[[random.Random], Pair], ...] = (
    about_colour, about_colour, about_home, about_home, about_legs, about_legs, about_sound, about_food,
    about_food, about_baby, about_opposite, about_opposite, about_kind, about_kind, about_animal, about_use,
    about_making, about_job, about_size, about_ability, about_capital, about_order, about_order, about_sum,
    about_sum, about_sum, about_sum, about_counting, about_group, about_sentence, about_record, plain,
    plain, small_talk, small_talk, small_talk,
    small_talk, small_talk, small_talk, unknown, unknown, poem,
)  # fmt: skip


def loosen(rng: random.Random, question: str) -> str:
    """Return a question as people type it: with "please", without capitals, without a question mark.

    Args:
        rng: random number generator.
        question: the tidy question.
    """
    chance = rng.random()
    if chance < 0.06 and question.startswith(("Tell", "Give", "Name", "Write", "Count", "Describe")):
        question = "Please " + question[0].lower() + question[1:]
    elif chance < 0.09 and question.startswith(("What", "Where", "How many", "Which")):
        question = "Quire, " + question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    return question


def ask(rng: random.Random) -> Pair:
    """Return a question about anything, and its answer.

    Args:
        rng: random number generator.
    """
    question, answer = pick(rng, ASKERS)(rng)
    return loosen(rng, polish(question)), polish(answer)
