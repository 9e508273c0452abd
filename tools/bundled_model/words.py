"""The words that the stories of the bundled model are made of."""

from __future__ import annotations

GIRLS = (
    "Anna", "Mia", "Lucy", "Rosa", "Ella", "Nora", "Clara", "Lily", "Sara", "Ruth", "Maya", "Ivy", "Zoe",
    "Amy", "Jane", "Kate", "Alice", "Emma", "Molly", "Nina", "Grace", "Helen", "Sophie", "Daisy", "Pia",
    "Laura", "Olivia", "Eva", "Marie", "Julia", "Hannah", "Leila", "Aisha", "Yuki", "Carmen", "Greta", "Susan",
    "Betty", "Elena", "Martha", "Rachel", "Tina", "Vera", "Wendy", "Isabel", "Dora", "Freya", "Ines", "Mary",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Finn", "Hugo", "Oscar", "Paul", "Noah", "Adam", "Luke",
    "Peter", "Omar", "Ravi", "Theo", "Will", "Henry", "Carl", "Tim", "George", "David", "Felix", "Bob",
    "John", "James", "Daniel", "Martin", "Simon", "Robert", "Thomas", "Michael", "Kenji", "Ali", "Pedro", "Ivan",
    "Lars", "Anton", "Arthur", "Bruno", "Edgar", "Frank", "Harry", "Jonas", "Mark", "Nick", "Victor", "Walter",
)  # fmt: skip
PET_NAMES = (
    "Rusty", "Bella", "Pip", "Dot", "Bramble", "Misty", "Patch", "Hazel", "Biscuit", "Poppy", "Fern",
    "Sunny", "Nutmeg", "Pepper", "Willow", "Button", "Coco", "Ginger", "Pebble", "Clover",
)  # fmt: skip
ANIMALS = (
    "fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "duck", "frog", "squirrel", "hedgehog", "deer",
    "horse", "cow", "pig", "goat", "sheep", "hen", "goose", "swan", "robin", "crow", "parrot", "penguin",
    "seal", "turtle", "snail", "beetle", "ant", "bee", "butterfly", "spider", "bat", "badger", "otter",
    "beaver", "mole", "wolf", "lion", "tiger", "elephant", "monkey", "giraffe", "zebra", "camel", "donkey",
    "kitten", "puppy", "lamb", "dragon", "bird", "crab", "panda", "kangaroo",
    "dinosaur", "unicorn", "hamster", "koala", "dolphin", "shark", "octopus", "whale", "eagle", "ladybird", "lizard",
    "snake", "worm", "rat", "pony", "calf", "chick", "peacock", "raven", "moose", "buffalo", "cheetah", "leopard",
    "crocodile", "fish", "firefly", "caterpillar", "turkey", "pigeon", "mammoth",
)  # fmt: skip
MEN = (
    "sailor", "farmer", "baker", "king", "knight", "wizard", "fisherman", "gardener", "painter", "carpenter",
    "shepherd", "miller", "prince", "postman", "tailor", "cook", "soldier", "clockmaker", "man",
    "grandfather", "captain", "pirate", "hunter", "musician", "writer", "pilot", "giant",
)  # fmt: skip
WOMEN = (
    "sailor", "farmer", "baker", "queen", "teacher", "doctor", "gardener", "painter", "princess", "witch",
    "weaver", "cook", "singer", "shepherd", "potter", "captain", "woman", "grandmother", "inventor", "pirate",
    "mermaid", "writer", "pilot", "nurse", "fairy",
)  # fmt: skip
SUBJECT_WORDS = (
    "small", "little", "young", "old", "brave", "shy", "clever", "kind", "curious", "quiet", "cheerful",
    "lonely", "gentle", "proud", "tiny", "busy", "sleepy", "friendly", "grey", "big",
)  # fmt: skip
CHILD_WORDS = (
    "small", "little", "brave", "shy", "clever", "kind", "curious", "quiet", "cheerful", "lonely", "gentle", "proud",
    "busy", "sleepy", "friendly", "young",
)  # fmt: skip
FRIEND_WORDS = ("kind", "old", "clever", "friendly", "wise", "young", "little", "merry", "gentle", "big")
OBJECTS = (
    "kite", "ball", "hat", "key", "book", "lamp", "drum", "bell", "coin", "ring", "box", "shell", "feather",
    "scarf", "basket", "map", "stone", "button", "flute", "mirror", "umbrella", "cup", "spoon", "bottle",
    "ribbon", "lantern", "blanket", "coat", "bag", "brush", "whistle", "candle", "crown", "bucket", "toy",
    "balloon", "flag", "pencil", "clock", "necklace",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "purple", "orange", "pink", "silver",
    "golden",
)  # fmt: skip
OBJECT_WORDS = (*COLOURS, *COLOURS, "little", "old", "shiny", "beautiful", "strange", "tiny")
PLACES = (
    ("in", "the forest"), ("in", "the park"), ("in", "the garden"), ("in", "the meadow"),
    ("in", "the village"), ("on", "the beach"), ("on", "the hill"), ("by", "the river"), ("by", "the lake"),
    ("on", "the farm"), ("in", "the field"), ("at", "the market"), ("in", "the valley"),
    ("near", "the mountain"), ("on", "the island"), ("near", "the castle"), ("in", "the town"),
    ("at", "the harbour"), ("near", "the old mill"), ("in", "the barn"), ("in", "the orchard"),
    ("near", "the cave"), ("by", "the sea"), ("near", "the bridge"), ("by", "the pond"),
)  # fmt: skip
HOMES = (
    "in a small village", "near a deep forest", "by the sea", "on a green hill", "beside a quiet river",
    "in a little house", "at the edge of a forest", "on a farm", "in a big town", "near a blue lake",
    "in a warm valley", "under a tall tree", "near an old castle", "on a small island", "in a green meadow",
    "beside a stone bridge", "in a sunny garden", "at the foot of a mountain",
)  # fmt: skip
SYLLABLES = (
    "ka", "lo", "mi", "ru", "za", "be", "to", "fi", "nu", "sha", "pel", "dor", "wen", "gri", "vo", "tal", "qui", "lan",
    "mer",
    "bo", "ye", "ran", "dil", "sto", "ja", "kel", "hu", "tri", "os", "vin",
)  # fmt: skip
FOODS = (
    "bread", "soup", "cheese", "cake", "apple pie", "porridge", "plum cake", "pumpkin soup", "nut cake",
    "rice",
)  # fmt: skip
PLANTS = (
    "rose", "sunflower", "pumpkin", "apple tree", "bean plant", "carrot", "tulip", "strawberry plant",
)  # fmt: skip
SKILLS = (
    "swim", "sing", "dance", "paint", "read", "cook", "climb", "skate", "juggle", "whistle", "sew", "fish",
    "play the drum", "play the flute", "ride a bicycle", "bake bread", "write poems", "count to a hundred",
)  # fmt: skip
HOBBIES = (
    "to sing", "to walk by the water", "to look at the stars", "to tell stories", "to climb trees",
    "to help others", "to collect stones", "to watch the clouds", "to sleep in the sun", "to ask questions",
    "to play games", "to listen to the rain", "to make new friends", "to draw pictures", "to eat cake",
)  # fmt: skip
TRAITS = (
    "very curious", "very kind", "a little shy", "often lonely", "always busy", "always cheerful",
    "not very big", "not afraid of anything", "a good friend", "often hungry", "very clever",
    "always ready to help",
)  # fmt: skip
WEATHER = (
    "The sun was shining and the sky was blue.", "It was a cold and windy day.", "The air was warm and still.",
    "Soft rain was falling on the ground.", "The snow lay white on the ground.", "A gentle wind was blowing.",
    "The sky was grey and full of clouds.", "It was the first warm day of spring.", "The leaves were falling.",
    "The birds were singing.", "It was a hot summer day.", "There was fog over the fields.",
)  # fmt: skip
DAYS = (
    "One day,", "One morning,", "One sunny morning,", "One rainy day,", "One cold evening,", "One afternoon,",
    "One spring day,", "One windy day,", "One summer evening,", "Early one morning,", "One quiet afternoon,",
    "On a bright winter day,", "One autumn morning,",
)  # fmt: skip
BEGINNINGS = (
    "Once upon a time,", "Once upon a time,", "Once upon a time,", "Long ago,", "A long time ago,", "Once,",
    *DAYS,
)  # fmt: skip
NAMELESS = frozenset({"man", "woman", "grandfather", "grandmother", "king", "queen"})
LONG_AGO = ("Once upon a time,", "Once upon a time,", "Long ago,", "A long time ago,")
NEXT = ("The next day,", "The next morning,", "A few days later,", "A week later,", "Some time later,",
        "When spring came,", "When winter came,", "Soon after that,")  # fmt: skip
LESSONS = (
    "a kind word can help a lot", "good friends share what they have", "it is good to ask for help",
    "small ones can do big things", "it is better to tell the truth", "patience is a great gift",
    "everyone is good at something", "being brave means trying even when you are afraid",
    "a good deed is never lost", "home is where your friends are", "nobody has to be alone",
)  # fmt: skip
