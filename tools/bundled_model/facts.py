"""Facts that the assistant of the bundled model knows."""

from __future__ import annotations

COLOUR = {
    "a lemon": "yellow", "a banana": "yellow", "the sun": "yellow", "grass": "green", "a frog": "green",
    "a leaf": "green", "a cucumber": "green", "the sky": "blue", "the sea": "blue", "snow": "white",
    "milk": "white", "a swan": "white", "a polar bear": "white", "salt": "white", "coal": "black",
    "a crow": "black", "the night": "dark", "a tomato": "red", "a strawberry": "red", "a cherry": "red",
    "blood": "red", "a carrot": "orange", "an orange": "orange", "a pumpkin": "orange", "a fox": "red",
    "a pig": "pink", "a flamingo": "pink", "chocolate": "brown", "a bear": "brown", "wood": "brown",
    "a plum": "purple", "an elephant": "grey", "a mouse": "grey", "a cloud": "white", "gold": "yellow",
    "a canary": "yellow", "a pea": "green", "a blueberry": "blue", "an eggplant": "purple", "butter": "yellow",
}  # fmt: skip
LIVES = {
    "fish": "in the water", "fox": "in a den in the forest", "bird": "in a nest", "bear": "in the forest",
    "bee": "in a hive", "cow": "on a farm", "pig": "on a farm", "horse": "in a stable", "rabbit": "in a burrow",
    "mole": "under the ground", "whale": "in the sea", "shark": "in the sea", "camel": "in the desert",
    "penguin": "on the ice near the sea", "monkey": "in the trees", "owl": "in a hollow tree",
    "squirrel": "in the trees", "frog": "by the pond", "duck": "by the water", "spider": "in a web",
    "ant": "in an ant hill", "lion": "on the wide plains of Africa", "tiger": "in the jungle",
    "dog": "with people in a house", "cat": "with people in a house", "mouse": "in a hole",
    "wolf": "in the forest", "hen": "in a hen house", "sheep": "on a farm", "crab": "on the beach",
    "elephant": "in Africa and Asia", "giraffe": "in Africa", "kangaroo": "in Australia", "snail": "in its shell",
    "beaver": "by the river", "polar bear": "on the ice in the north", "bat": "in a cave",
    "hedgehog": "under bushes and leaves", "deer": "in the forest", "goat": "in the mountains",
}  # fmt: skip
LEGS = {
    "spider": "eight", "ant": "six", "bee": "six", "beetle": "six", "butterfly": "six", "fly": "six",
    "dog": "four", "cat": "four", "horse": "four", "cow": "four", "fox": "four", "lion": "four",
    "elephant": "four", "mouse": "four", "sheep": "four", "pig": "four", "frog": "four", "rabbit": "four",
    "bear": "four", "goat": "four", "wolf": "four", "tiger": "four", "bird": "two", "duck": "two", "hen": "two",
    "owl": "two", "penguin": "two", "person": "two", "swan": "two", "snake": "no", "fish": "no", "worm": "no",
    "whale": "no", "crab": "ten", "table": "four", "chair": "four",
}  # fmt: skip
SOUND = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "hen": "cluck",
    "frog": "croak", "owl": "hoot", "bee": "buzz", "mouse": "squeak", "horse": "neigh", "lion": "roar",
    "crow": "caw", "snake": "hiss", "wolf": "howl", "bird": "tweet", "goose": "honk",
}  # fmt: skip
EATS = {
    "rabbit": "grass and carrots", "cow": "grass", "horse": "grass and hay", "cat": "fish and mice",
    "dog": "meat", "mouse": "cheese and seeds", "bear": "berries, fish and honey", "monkey": "fruit",
    "lion": "meat", "tiger": "meat", "wolf": "meat", "owl": "mice", "frog": "flies", "spider": "flies",
    "squirrel": "nuts", "bird": "seeds and worms", "hen": "corn and worms", "sheep": "grass", "fox": "mice and berries",
    "penguin": "fish", "seal": "fish", "panda": "bamboo", "goat": "grass and leaves", "giraffe": "leaves",
    "elephant": "grass, leaves and fruit", "duck": "plants and small fish", "hedgehog": "snails and beetles",
    "bee": "nectar from flowers", "pig": "almost everything", "deer": "grass and leaves", "bat": "insects",
}  # fmt: skip
BABY = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "pig": "piglet",
    "hen": "chick", "duck": "duckling", "bear": "cub", "lion": "cub", "fox": "cub", "goat": "kid",
    "frog": "tadpole", "deer": "fawn", "kangaroo": "joey", "goose": "gosling", "swan": "cygnet", "seal": "pup",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("old", "young"), ("fast", "slow"),
    ("happy", "sad"), ("open", "closed"), ("long", "short"), ("light", "dark"), ("wet", "dry"),
    ("hard", "soft"), ("high", "low"), ("left", "right"), ("good", "bad"), ("full", "empty"), ("rich", "poor"),
    ("loud", "quiet"), ("clean", "dirty"), ("strong", "weak"), ("early", "late"), ("near", "far"),
    ("black", "white"), ("yes", "no"), ("thick", "thin"), ("heavy", "light"), ("first", "last"),
    ("summer", "winter"), ("begin", "end"), ("give", "take"), ("love", "hate"), ("true", "false"),
)  # fmt: skip
IS_A = {
    "fox": "a clever wild animal with a red coat", "dog": "a friendly animal that lives with people",
    "cat": "a soft animal that likes to sleep and to catch mice", "cow": "a large farm animal that gives milk",
    "hen": "a farm bird that lays eggs", "sheep": "a farm animal that gives wool",
    "bee": "a small insect that makes honey", "spider": "a small animal that makes webs",
    "owl": "a bird that flies at night", "horse": "a large animal that people can ride",
    "whale": "a very large animal that breathes air and swims in the sea",
    "penguin": "a bird that can swim but cannot fly",
    "lion": "a big cat with a loud roar", "elephant": "a very big animal with a long trunk",
    "rabbit": "a small animal with long ears", "mouse": "a very small animal with a long tail",
    "bear": "a big and strong animal with thick fur", "frog": "a small green animal that can jump far",
    "duck": "a bird that swims on ponds and lakes", "wolf": "a wild animal that looks like a big dog",
    "robot": "a machine that can move and do work", "kite": "a toy that flies in the wind on a string",
    "lamp": "a thing that gives light", "library": "a house full of books", "river": "water that flows to the sea",
    "island": "land with water all around it", "mountain": "a very high hill", "star": "a far sun that shines at night",
    "volcano": "a mountain that can throw out fire and hot rock", "desert": "a dry place with very little rain",
    "forest": "a place with many trees", "school": "a place where children learn",
    "clock": "a thing that shows the time",
    "map": "a drawing that shows where places are", "bridge": "a way over a river",
    "story": "a tale about people or animals",
    "friend": "somebody who likes you and helps you", "giraffe": "a tall animal with a very long neck",
    "boat": "a thing that carries people over water", "snail": "a slow animal with a house on its back",
    "page": "one side of a sheet of paper in a book", "computer": "a machine that works with numbers and words",
}  # fmt: skip
USED_FOR = {
    "a key": "open a door", "a hammer": "hit nails", "a knife": "cut things", "a pen": "write",
    "a pencil": "write and draw", "a lamp": "make light", "an umbrella": "stay dry in the rain", "a bed": "sleep",
    "a spoon": "eat soup", "a broom": "sweep the floor", "scissors": "cut paper", "a clock": "tell the time",
    "a boat": "cross the water", "a ladder": "climb up high", "a needle": "sew", "a cup": "drink",
    "soap": "wash your hands", "a map": "find the way", "a coat": "keep warm", "a camera": "take pictures",
    "a bell": "ring", "a rope": "tie things", "an oven": "bake bread", "a book": "read",
}  # fmt: skip
MADE_OF = {
    "a table": "wood", "a window": "glass", "a book": "paper", "a key": "metal", "bread": "flour and water",
    "cheese": "milk", "butter": "milk", "a shirt": "cloth", "a sweater": "wool", "a snowman": "snow", "ice": "water",
    "a candle": "wax", "a house": "stone or wood", "a coin": "metal", "jam": "fruit and sugar",
    "a cloud": "tiny drops of water",
    "a shoe": "leather", "a wall": "stone", "a bottle": "glass", "glass": "sand", "paper": "wood",
    "an omelette": "eggs",
}  # fmt: skip
JOBS = {
    "baker": "bakes bread and cakes", "farmer": "grows food and keeps animals", "teacher": "helps children to learn",
    "doctor": "helps people who are ill", "sailor": "works on a ship", "gardener": "takes care of plants",
    "painter": "paints pictures and walls", "fisherman": "catches fish", "cook": "makes food",
    "pilot": "flies a plane", "carpenter": "makes things out of wood", "shepherd": "takes care of sheep",
    "postman": "brings letters", "tailor": "makes clothes", "singer": "sings songs", "writer": "writes books",
    "miller": "makes flour", "librarian": "takes care of books",
    "dentist": "takes care of teeth",
}  # fmt: skip
SIZES = ("ant", "bee", "mouse", "frog", "hedgehog", "rabbit", "cat", "fox", "dog", "wolf", "sheep", "pig", "lion",
         "bear", "horse", "giraffe", "elephant", "whale")  # fmt: skip
CAN = {
    "bird": ("fly", "read"), "fish": ("swim", "walk"), "frog": ("jump", "fly"), "horse": ("run", "fly"),
    "duck": ("swim", "read"), "bee": ("fly", "sing"), "penguin": ("swim", "fly"), "snake": ("swim", "walk"),
    "bat": ("fly", "read"), "dog": ("run", "fly"), "cat": ("climb", "fly"), "snail": ("crawl", "run"),
    "owl": ("fly", "swim"), "monkey": ("climb", "fly"), "kangaroo": ("jump", "fly"), "cow": ("walk", "fly"),
    "pig": ("run", "fly"), "elephant": ("swim", "jump"), "butterfly": ("fly", "swim"), "whale": ("swim", "walk"),
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "England": "London",
    "Japan": "Tokyo", "China": "Beijing", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Norway": "Oslo", "Sweden": "Stockholm", "Egypt": "Cairo", "Poland": "Warsaw", "Ireland": "Dublin",
    "India": "New Delhi", "Russia": "Moscow", "Canada": "Ottawa", "Switzerland": "Bern", "Denmark": "Copenhagen",
}  # fmt: skip
DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
GROUPS = {
    "animals": ("a fox", "an owl", "a bear", "a horse", "a mouse", "a lion", "a frog", "a whale"),
    "fruits": ("an apple", "a pear", "a plum", "a cherry", "a banana", "an orange", "a lemon"),
    "colours": ("red", "blue", "green", "yellow", "white", "black", "purple", "orange"),
    "farm animals": ("a cow", "a pig", "a sheep", "a hen", "a goat", "a horse"),
    "birds": ("an owl", "a crow", "a swan", "a duck", "a robin", "a penguin"),
    "days": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    "vegetables": ("a carrot", "a potato", "a bean", "a pea", "an onion"),
    "tools": ("a hammer", "a saw", "a rope", "a ladder", "a knife"),
    "insects": ("a bee", "an ant", "a fly", "a beetle", "a butterfly"),
    "seasons": ("spring", "summer", "autumn"),
}  # fmt: skip
PLAIN = (
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many seasons are there?", "There are four seasons: spring, summer, autumn and winter."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many fingers do I have?", "You have ten fingers, five on each hand."),
    ("Is ice hot or cold?", "Ice is cold."), ("Is fire hot or cold?", "Fire is hot."),
    ("Is the sun hot?", "Yes, the sun is very hot."), ("Is water wet?", "Yes, water is wet."),
    ("What falls from the sky when it rains?", "When it rains, water falls from the sky."),
    ("When does the sun rise?", "The sun rises in the morning."),
    ("When does the sun set?", "The sun sets in the evening."),
    ("What shines at night?", "The moon and the stars shine at night."),
    ("What do we do at night?", "At night, we sleep."), ("Why do we sleep?", "We sleep because our body needs rest."),
    ("Why do we eat?", "We eat because our body needs food to live and grow."),
    ("What do plants need?", "Plants need water, light and good earth."),
    ("Where does milk come from?", "Milk comes from cows."), ("Where do eggs come from?", "Eggs come from hens."),
    ("Where does honey come from?", "Honey comes from bees."), ("Where does wool come from?", "Wool comes from sheep."),
    ("Where does rain come from?", "Rain comes from clouds."),
    ("What makes a rainbow?", "Sun and rain together make a rainbow."),
    ("How many colours does a rainbow have?", "A rainbow has seven colours."),
    ("Is the earth flat or round?", "The earth is round."), ("What do you see with?", "People see with their eyes."),
    ("What do we hear with?", "We hear with our ears."), ("What do we smell with?", "We smell with our nose."),
    ("Which animal is the tallest?", "The giraffe is the tallest animal."),
    ("What is the biggest animal?", "The blue whale is the biggest animal."),
    ("What is the fastest animal on land?", "The cheetah is the fastest animal on land."),
    ("What is two times three?", "Two times three is six."),
    ("What colour do red and yellow make?", "Red and yellow make orange."),
    ("What colour do blue and yellow make?", "Blue and yellow make green."),
    ("What colour do red and blue make?", "Red and blue make purple."),
    ("What colour do red and white make?", "Red and white make pink."),
    ("What is the capital of the moon?", "The moon has no capital."),
    ("How many wheels does a bicycle have?", "A bicycle has two wheels."),
    ("How many wheels does a car have?", "A car has four wheels."),
    ("How many eyes does a person have?", "A person has two eyes."),
    ("What is the coldest season?", "Winter is the coldest season."),
    ("What is the warmest season?", "Summer is the warmest season."),
    ("When do leaves fall?", "The leaves fall in autumn."),
    ("When do flowers bloom?", "Most flowers bloom in spring."),
    ("What is paged memory?", "Paged memory is memory that is cut into pages of the same size."),
)  # fmt: skip
