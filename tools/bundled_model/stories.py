"""Small stories with a fixed subject, friend, thing and place each."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from tools.bundled_model import words
from tools.bundled_model.more_plots import PLOTS
from tools.bundled_model.plots import Plot

T = TypeVar("T")
FEARS = ("the dark", "deep water", "thunder", "the night", "big dogs", "high places", "strangers")
BUILT = ("small boat", "tree house", "bridge", "little house", "tower", "swing", "raft", "cart", "hut")
CASES = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
    "it": ("it", "it", "its", "itself"),
}
_SENTENCE = re.compile(r"(^|[.!?] )([a-z])")
_LASTING = re.compile(r"\{n\} (had (?!an idea)|was (afraid|brave|lonely|new|looking)|wished|wanted)")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


def pick(rng: random.Random, options: tuple[T, ...]) -> T:
    """Return a random one of the options.

    Args:
        rng: random number generator.
        options: values to choose from.
    """
    return options[int(rng.random() * len(options))]


def polish(text: str) -> str:
    """Return sentences with capitals at their beginnings, and with "an" for "a" before vowels.

    Args:
        text: one or more sentences.
    """
    text = _ARTICLE.sub(r"\1n ", text)
    return _SENTENCE.sub(lambda found: found.group(1) + found.group(2).upper(), text)


@dataclass(frozen=True)
class Being:
    """A character of a story.

    Attributes:
        first: words of the first mention ("a small fox named Rusty").
        later: words of later mentions ("the fox", "Rusty").
        pronoun: "he", "she" or "it".
        name: name in direct speech.
        known: words of a mention without an introduction ("the old sailor").
    """

    first: str
    later: tuple[str, ...]
    pronoun: str
    name: str
    known: str


def new_name(rng: random.Random) -> str:
    """Return an invented name, so that the model learns to keep names that it has never read.

    Args:
        rng: random number generator.
    """
    return "".join(pick(rng, words.SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def person(rng: random.Random, pronoun: str) -> Being:
    """Return a boy, a girl or an adult with a name.

    Args:
        rng: random number generator.
        pronoun: "he" or "she".
    """
    name = pick(rng, words.GIRLS if pronoun == "she" else words.BOYS)
    name = new_name(rng) if rng.random() < 0.06 else name
    kind = "girl" if pronoun == "she" else "boy"
    word = pick(rng, words.CHILD_WORDS) + " " if rng.random() < 0.5 else ""
    first = f"a {word}{kind} named {name}" if rng.random() < 0.8 else f"a {word}{kind} called {name}"
    return Being(first, (name,), pronoun, name, name)


def creature(rng: random.Random, pronoun: str, noun: str, word: str, named: bool) -> Being:
    """Return an animal, or a person known by a trade.

    Args:
        rng: random number generator.
        pronoun: "he", "she" or "it".
        noun: kind of the being, such as "fox" or "sailor".
        word: adjective, or "".
        named: True where the being has a name.
    """
    full = f"{word} {noun}" if word else noun
    if not named:
        later = (f"the {noun}", f"the {noun}", f"the {full}")
        return Being(f"a {full}", later, pronoun, full.title(), f"the {full}")
    trade = noun in words.MEN or noun in words.WOMEN
    people = words.GIRLS if pronoun == "she" else words.BOYS
    name = pick(rng, people if trade else words.PET_NAMES)
    name = new_name(rng) if rng.random() < 0.1 else name
    later = (name, name, f"the {noun}")
    return Being(f"a {full} named {name}", later, pronoun, name, f"{name} the {noun}")


def being(rng: random.Random, pronoun: str, adjectives: tuple[str, ...]) -> Being:
    """Return a random character.

    Args:
        rng: random number generator.
        pronoun: "he", "she" or "it".
        adjectives: words that may describe them.
    """
    if pronoun == "it":
        return creature(rng, "it", "robot", pick(rng, adjectives), rng.random() < 0.3)
    kind = rng.random()
    if kind < 0.34:
        return person(rng, pronoun)
    trades = words.MEN if pronoun == "he" else words.WOMEN
    noun = pick(rng, words.ANIMALS) if kind < 0.8 else pick(rng, trades)
    word = pick(rng, adjectives) if rng.random() < 0.75 else ""
    return creature(rng, pronoun, noun, word, rng.random() < 0.3 and noun not in words.NAMELESS)


@dataclass(frozen=True)
class Cast:
    """Characters, things and plot of a story.

    Attributes:
        hero: the subject.
        friend: the other one.
        thing: the object, such as "kite".
        look: the word for the object, such as "red".
        place: preposition and name of the place.
        other: another place.
        home: home of the subject.
        plot: plot of the story.
    """

    hero: Being
    friend: Being
    thing: str
    look: str
    place: tuple[str, str]
    other: tuple[str, str]
    home: str
    plot: Plot


def cast(rng: random.Random) -> Cast:
    """Return a random cast.

    Args:
        rng: random number generator.
    """
    pronoun = pick(rng, ("he",) * 12 + ("she",) * 12 + ("it",))
    # The friend has the other pronoun, so that "he" and "she" are unambiguous.
    opposite = {"he": "she", "she": "he", "it": pick(rng, ("he", "she"))}[pronoun]
    hero = being(rng, pronoun, words.SUBJECT_WORDS)
    friend = being(rng, opposite, words.FRIEND_WORDS)
    while friend.later[0] == hero.later[0] or set(friend.later) & set(hero.later):
        friend = being(rng, opposite, words.FRIEND_WORDS)
    if friend.first.startswith(("a boy named", "a girl named")) and rng.random() < 0.5:
        friend = replace(friend, first=f"{CASES[pronoun][2]} friend {friend.name}")
    place, other = rng.sample(words.PLACES, 2)
    thing = pick(rng, words.OBJECTS)
    look = pick(rng, words.OBJECT_WORDS)
    return Cast(hero, friend, thing, look, place, other, pick(rng, words.HOMES), pick(rng, PLOTS))


class Slots(Mapping[str, str]):
    """Texts for the names in braces; a name with several wordings gets a random one each time."""

    def __init__(self, rng: random.Random, chosen: Cast) -> None:
        """Prepare the fixed names.

        Args:
            rng: random number generator.
            chosen: cast of the story.
        """
        self.rng = rng
        self.chosen = chosen
        self.opening: str | None = None
        he, him, his, himself = CASES[chosen.hero.pronoun]
        fhe, fhim, fhis, _ = CASES[chosen.friend.pronoun]
        built = pick(rng, BUILT)
        hobbies, traits = rng.sample(words.HOBBIES, 2), rng.sample(words.TRAITS, 2)
        coloured = f"{chosen.look} {chosen.thing}"
        self.fixed = {
            "he": he, "him": him, "his": his, "himself": himself, "fhe": fhe, "fhim": fhim, "fhis": fhis,
            "o": chosen.thing, "co": coloured, "a_co": f"a {coloured}", "name": chosen.hero.name,
            "p": chosen.place[1], "at_p": " ".join(chosen.place), "at_q": " ".join(chosen.other),
            "q": chosen.other[1], "a_n": chosen.hero.first, "a_f": chosen.friend.first, "home": chosen.home,
            "food": pick(rng, words.FOODS), "plant": pick(rng, words.PLANTS), "skill": pick(rng, words.SKILLS),
            "fear": pick(rng, FEARS), "built": built, "a_built": f"a {built}",
            "colour": pick(rng, words.COLOURS[:8]), "hobby": hobbies[0],
            "hobby2": hobbies[1], "trait": traits[0], "trait2": traits[1],
            "long_ago": pick(rng, words.LONG_AGO), "day": pick(rng, words.DAYS), "begin": pick(rng, words.BEGINNINGS),
            "lesson": pick(rng, words.LESSONS), "weather": pick(rng, words.WEATHER),
        }  # fmt: skip

    def __getitem__(self, key: str) -> str:
        """Return the text for a name.

        Args:
            key: name in braces.
        """
        if key == "n":
            text = self.opening or pick(self.rng, self.chosen.hero.later)
            self.opening = None
            return text
        if key == "f":
            return pick(self.rng, self.chosen.friend.later)
        if key == "the_o":
            return "the " + self.fixed["o" if self.rng.random() < 0.65 else "co"]
        return self.fixed[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the fixed names."""
        return iter(self.fixed)

    def __len__(self) -> int:
        """Count the fixed names."""
        return len(self.fixed)

    def fill(self, template: str) -> str:
        """Fill a template.

        Args:
            template: text with names in braces.

        Returns:
            One or more finished sentences.
        """
        return polish(template.format_map(self))


INTRODUCTIONS = (
    "{long_ago} there was {a_n} who lived {home}.", "{long_ago} there was {a_n}.", "{long_ago} {a_n} lived {home}.",
    "Once upon a time, there lived {a_n}.", "There was once {a_n} who liked {hobby}.", "{a_n} lived {home}.",
    "Once upon a time, {home}, there lived {a_n}.", "Once there was {a_n} who was {trait}.",
    "This is the story of {a_n} who lived {home}.", "Once upon a time, {a_n} lived alone {home}.",
)  # fmt: skip
DETAILS = (
    "{he} was {trait2}.", "{he} liked {hobby2}.", "{n} was {trait2} and liked {hobby2}.",
    "Every day, {he} went to {p}.", "Everyone {at_p} knew {him}.", "{n} was {trait2}.", "", "",
)  # fmt: skip
ENDINGS = (
    "The end.", "And they lived happily ever after.", "{n} was very happy.", "And so {n} learned that {lesson}.",
    "That was the best day of {his} life.", "And that is the end of the story.", "What a day that was!",
    "{n} smiled and went to sleep.", "And {n} never forgot that day.", "", "", "", "", "", "", "", "",
)  # fmt: skip


def _opening(rng: random.Random, slots: Slots) -> list[str]:
    """Return the first sentences of a story.

    Args:
        rng: random number generator.
        slots: texts for the names in braces.
    """
    chosen = slots.chosen
    first_beat = pick(rng, chosen.plot.beats[0])
    # "One day, Tom had a friend" would be odd: a lasting state is told without a day.
    lasting = _LASTING.match(first_beat) is not None
    if rng.random() < 0.5:
        told = [slots.fill(pick(rng, INTRODUCTIONS)), slots.fill(pick(rng, DETAILS))]
        lead = "{day} " if rng.random() < 0.6 and not lasting else ""
        if not lead and rng.random() < 0.5:
            told.append(slots.fill("{weather}"))
        return [*told, slots.fill(lead + first_beat)]
    start = rng.random()
    lead = "" if start >= 0.45 else "{long_ago} " if lasting else "{begin} "
    first, known = chosen.hero.first, chosen.hero.known
    slots.opening = pick(rng, (first, first, known) if lead else (first, known, known))
    told = [slots.fill("{weather}")] if start > 0.93 else []
    return [*told, slots.fill(lead + first_beat)]


def tell(rng: random.Random, chosen: Cast, brief: bool = False, slots: Slots | None = None) -> str:
    """Return a story.

    Args:
        rng: random number generator.
        chosen: cast of the story.
        brief: True to leave out optional beats.
        slots: texts for the names in braces, if they are prepared already.

    Returns:
        The story as one paragraph.
    """
    slots = slots or Slots(rng, chosen)
    told = _opening(rng, slots)
    for beat in chosen.plot.beats[1:]:
        if "" in beat and (brief or rng.random() < 0.35):
            continue
        told.append(slots.fill(pick(rng, tuple(option for option in beat if option))))
    told.append(slots.fill(pick(rng, ENDINGS)))
    return " ".join(sentence for sentence in told if sentence)


def long_story(rng: random.Random, parts: int) -> str:
    """Return a story of several adventures of one subject.

    Args:
        rng: random number generator.
        parts: number of adventures.

    Returns:
        The story, one paragraph for each adventure.
    """
    chosen = cast(rng)
    told = [tell(rng, chosen)]
    for plot in rng.sample(PLOTS, parts):
        fresh = cast(rng)
        while fresh.friend.pronoun == chosen.hero.pronoun or set(fresh.friend.later) & set(chosen.hero.later):
            fresh = cast(rng)
        chosen = replace(fresh, hero=chosen.hero, home=chosen.home, plot=plot)
        slots = Slots(rng, chosen)
        beats = [pick(rng, words.NEXT) + " " + pick(rng, plot.beats[0])]
        beats += [pick(rng, tuple(option for option in beat if option)) for beat in plot.beats[1:]]
        told.append(" ".join(slots.fill(beat) for beat in beats))
    return "\n\n".join(told)
