"""The plots of the stories: each is a list of beats, and each beat has several wordings.

The names in braces are filled by ``stories.py``. An empty wording marks a beat that may be left out.
The first beat of a plot begins with the subject, so that it can open a story on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

Beats = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        ask: words of a request for the plot, after the subject ("who found a red kite").
        uses: those of object, friend and place that the plot mentions.
        beats: beats in order.
    """

    ask: str
    uses: frozenset[str]
    beats: Beats


FOUND = Plot("who found {a_co}", frozenset({"object", "friend", "place"}), (
    ("{n} found {a_co} {at_p}.", "{n} was walking {at_p} and found {a_co}.",
     "{n} saw {a_co} lying on the ground {at_p}."),
    ("It was the most beautiful {o} that {he} had ever seen.", "{he} picked up {the_o} and looked at it.",
     '"Whose {o} is this?" {he} asked.', "{the_o} looked lost and alone."),
    ("{he} wanted to keep {the_o}, but {he} knew that it belonged to someone.",
     "{n} thought about it for a while. Somebody must be missing {the_o}.",
     '"Somebody must be looking for it," said {n}.'),
    ("So {he} went from door to door and asked about {the_o}.",
     "{he} took {the_o} and went to {q} to ask about it.", "{he} asked everyone {at_p}, but nobody knew.", ""),
    ("At last, {he} met {a_f}, who was crying.", "Then {he} met {a_f}, who looked very sad.",
     "After a long walk, {he} met {a_f}."),
    ('"I have lost my {o}," said {f}. "I have looked for it everywhere."',
     '"Have you seen my {o}?" asked {f}. "It is very dear to me."'),
    ('{n} smiled and gave {the_o} to {f}.', '"Is this your {o}?" asked {n}. {f} jumped for joy.',
     '"Here it is," said {n}, and gave {the_o} back.'),
    ('"Thank you!" said {f}. "You are very honest."', '{f} thanked {him} with all {fhis} heart.',
     "{f} was so happy that {fhe} danced."),
    ("From that day on, {n} and {f} were friends.", "They played together with {the_o} until the evening.",
     "{n} went home with a light heart.", "{f} and {n} shared {the_o} after that."),
))  # fmt: skip

LOST = Plot("who lost {a_co}", frozenset({"object", "friend", "place"}), (
    ("{n} had {a_co} and took it everywhere.", "{n} had {a_co} that {he} loved very much.",
     "{n} lost {a_co} {at_p}."),
    ("In the evening, {the_o} was gone.", "When {he} came home, {the_o} was not there.",
     "{the_o} had fallen out of {his} bag, and it was gone."),
    ("{he} looked under the bed and behind the door, but {the_o} was not there.",
     '"Where is my {o}?" cried {n}.', "{n} looked everywhere, but {he} could not find it.",
     "{he} was very sad and did not know what to do."),
    ("{he} went to {q} and looked there too.", "{he} looked {at_q}, but there was no {o}.", ""),
    ("On the way, {he} met {a_f}.", "Then {a_f} came along.", "{a_f} heard {him} crying."),
    ('"Why are you sad?" asked {f}.', '"What is wrong?" asked {f}.', '"Can I help you?" asked {f}.'),
    ('"I have lost my {o}," said {n}.', '"My {o} is gone," said {n}. "I cannot find it anywhere."'),
    ('"Do not worry," said {f}. "We will look for it together."', '"Let us look together," said {f}.'),
    ("They looked and looked. At last, {f} saw {the_o} {at_p}.",
     "{f} looked {at_p}, and there was {the_o}!", "After a while, they found {the_o} {at_p}."),
    ('"You found it!" said {n}. "Thank you!"', "{n} was so happy that {he} laughed out loud.",
     "{n} held {the_o} close and smiled."),
    ("After that, {n} always took good care of {the_o}.", "{n} never lost {the_o} again.",
     "{n} and {f} became the best of friends."),
))  # fmt: skip

STORM = Plot("who was caught in a storm", frozenset({"friend", "place"}), (
    ("{n} was walking {at_p} when the sky became dark.", "{n} was {at_p} when a great storm began.",
     "{n} went to {p}, but soon dark clouds came."),
    ("The wind blew hard and the rain began to fall.", "Thunder rolled over {p} and the rain fell hard.",
     "There was a flash of light and a loud crash."),
    ("{n} was wet and cold.", "{he} was afraid and wanted to go home.", "{he} could not see the way home.", ""),
    ("{he} ran as fast as {he} could and looked for a dry place.", "{he} looked for a place to hide.",
     '"I must find a dry place," said {n}.'),
    ("Then {he} saw a small light between the trees.", "Then {he} saw a little house with a light in it.",
     "At last, {he} saw an open door."),
    ("It was the home of {a_f}.", "{a_f} lived there.", "Inside sat {a_f} by a warm fire."),
    ('"Come in and get warm," said {f}.', '"You are wet!" said {f}. "Come and sit by the fire."'),
    ("{f} gave {him} {food} and a dry blanket.", "They ate {food} and told each other stories.",
     "{n} sat by the fire and ate {food}."),
    ("Soon the storm was over, and the stars came out.", "In the morning, the sky was clear again.",
     "After a while, the rain stopped."),
    ('"Thank you for your help," said {n}.', "{n} thanked {f} and went home.",
     "{n} promised to visit {f} again."),
    ("Since then, {n} is no longer afraid of storms.", "After that, {n} often came to visit {f}.",
     "{n} never forgot how kind {f} had been.", ""),
))  # fmt: skip

LEARN = Plot("who wanted to learn to {skill}", frozenset({"friend", "place"}), (
    ("{n} wanted to learn to {skill}.", "{n} wished to {skill} more than anything else."),
    ("But it was not easy.", "The others laughed and said that it was too hard.",
     "At first, {he} could not do it at all.", "{he} tried it once, and it went badly."),
    ('"I will never learn it," said {n}.', "{n} was sad and wanted to give up.",
     "{he} sat down {at_p} and thought about it.", ""),
    ("Then {a_f} came by.", "One day, {he} met {a_f}.", "{a_f} saw {him} sitting there."),
    ('"I can teach you," said {f}.', '"Nobody can do it on the first day," said {f}. "Try again."',
     '"You only need to practise," said {f}.'),
    ("So {n} tried again and again.", "Every day, {n} practised {at_p}.",
     "{n} worked hard, and {f} helped {him}."),
    ("Little by little, it became easier.", "Sometimes {he} made mistakes, but {he} did not stop.", ""),
    ("After many days, {n} could {skill}!", "At last, {n} could {skill} very well.",
     "Then one day it worked, and {n} could {skill}."),
    ("{f} clapped and cheered.", '"You did it!" said {f}.', "Everyone came to watch, and they all cheered."),
    ("{n} was very proud.", "{n} had learned that you must never give up.",
     "Now {n} helps others who want to learn to {skill}."),
))  # fmt: skip

SHARE = Plot("who shared {food}", frozenset({"friend", "place"}), (
    ("{n} made {food} and took it to {p}.", "{n} had some {food} in a basket.",
     "{n} went to {p} with some {food} for lunch."),
    ("It smelled very good.", "{he} was very hungry.", "{he} sat down in the grass to eat.", ""),
    ("Just then, {a_f} came by.", "Then {he} saw {a_f} sitting alone {at_p}.", "Soon {a_f} came along."),
    ("{f} had not eaten all day.", "{f} looked tired and hungry.", '"I am so hungry," said {f}.'),
    ("{n} looked at the {food}. There was not very much.", "{n} thought for a moment.",
     "At first, {n} wanted to keep it all.", ""),
    ('"Please sit down and eat with me," said {n}.', '"We can share," said {n}, and gave {f} half of it.',
     "{n} gave half of it to {f}."),
    ("They ate together and talked about many things.", "They sat in the sun and ate the {food}.",
     "It tasted better than ever before."),
    ('"Thank you," said {f}. "You are a good friend."', '"That was the best {food} in the world," said {f}.'),
    ("The next day, {f} came back with {a_co} for {him}.", "The next day, {f} brought {him} a gift.",
     "A few days later, {f} shared {fhis} lunch with {n}.", ""),
    ("Now they eat together every day.", "{n} learned that sharing makes everyone happy.",
     "Both of them were full and happy."),
))  # fmt: skip

HELP = Plot("who helped a friend", frozenset({"friend", "place"}), (
    ("{n} heard a cry for help {at_p}.", "{n} was on the way to {p} and heard someone cry.",
     "{n} heard a strange sound {at_p}."),
    ("{he} stopped and listened.", "{he} ran to see what it was.", '"Who is there?" asked {n}.', ""),
    ("There was {a_f}, who had fallen into a hole.", "{he} saw {a_f}, who was stuck under a branch.",
     "It was {a_f}, who had hurt one foot."),
    ('"Please help me," said {f}.', '"I cannot move," said {f}.', '"Do not leave me alone," said {f}.'),
    ('"Do not be afraid," said {n}. "I will help you."', '"I will stay with you," said {n}.'),
    ("{n} looked for a long rope and came back quickly.", "{n} thought hard and had a good idea.",
     "{n} called some friends, and they all came to help.", "{n} pulled with all {his} strength.", ""),
    ("Soon {f} was free.", "After some time, {f} was safe.", "At last, {f} could stand up again."),
    ('"You saved me!" said {f}.', '"How can I thank you?" asked {f}.', '"I will never forget this," said {f}.'),
    ("{n} took {f} home and made {food}.", '"That is what friends are for," said {n}.',
     "They walked home together under the evening sky."),
    ("From that day on, {f} and {n} were best friends.", "One year later, {f} helped {n} in the same way.",
     "Everyone {at_p} heard about the good deed."),
))  # fmt: skip

BUILD = Plot("who built {a_built}", frozenset({"friend", "place"}), (
    ("{n} wanted to build {a_built}.", "{n} had an idea. {he} would build {a_built}."),
    ("{he} went to {p} to look for wood.", "{he} found some wood and some nails {at_p}.",
     "{he} drew a plan and thought about it all night."),
    ("But the work was hard, and the first {built} fell apart.", "It was too much work for one alone.",
     "The first day, nothing went well.", "The wood was heavy, and {he} was soon tired."),
    ("Then {a_f} came to {p}.", "{a_f} came by and watched.", "{he} asked {a_f} for help."),
    ('"What are you making?" asked {f}.', '"May I help you?" asked {f}.', '"I have good tools," said {f}.'),
    ("So they worked together, day after day.", "{n} held the wood, and {f} used the hammer.",
     "Together they worked until the sun went down."),
    ("They painted it {colour}.", "It rained for two days, but they did not stop.", ""),
    ("At last, the {built} was ready.", "After a week, the {built} was done.",
     "In the end, it was the best {built} that anyone had ever seen."),
    ("{n} and {f} looked at it with joy.", "Everyone came to see the {built}.",
     '"We did it!" said {n} and {f}.'),
    ("The {built} is still there today.", "{n} knew that two can do more than one.",
     "They used the {built} for many years."),
))  # fmt: skip

EARLIER: tuple[Plot, ...] = (FOUND, LOST, STORM, LEARN, SHARE, HELP, BUILD)
