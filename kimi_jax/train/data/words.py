"""The closed vocabulary of the generators: few enough words to learn, enough to never repeat a problem."""

PEOPLE = (
    "Ada", "Ben", "Clara", "David", "Emma", "Finn", "Greta", "Hugo", "Ida", "Jonas",
    "Kira", "Leo", "Mia", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tara", "Uwe",
)  # fmt: skip
SHE = frozenset(("Ada", "Clara", "Emma", "Greta", "Ida", "Kira", "Mia", "Olga", "Rosa", "Tara"))

THINGS = (
    "apples", "books", "boxes", "buttons", "cards", "chairs", "coins", "cups", "eggs", "flowers",
    "keys", "lamps", "marbles", "nuts", "pears", "pens", "plates", "seeds", "shells", "stamps", "stones", "toys",
)  # fmt: skip
HOLDERS = ("bags", "baskets", "drawers", "jars", "rows", "shelves", "trays", "crates")

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "orange")
ADJECTIVES = (*COLOURS, "old", "new", "small", "large", "round", "heavy", "quiet", "cold", "warm", "empty")
NOUNS = (
    "anchor", "ball", "bell", "boat", "bridge", "brush", "candle", "cart", "clock", "coat", "door", "drum", "fence",
    "flag", "gate", "hammer", "harbor", "hat", "house", "jacket", "kettle", "ladder", "lamp", "letter", "mirror",
    "needle", "oven", "pencil", "piano", "pillow", "ribbon", "river", "rope", "saddle", "school", "ship", "spoon",
    "stove", "table", "tent", "tower", "train", "wagon", "wheel", "window",
)  # fmt: skip
ANIMALS = ("bear", "cat", "cow", "crow", "deer", "dog", "duck", "fox", "frog", "goat", "hen", "horse", "mouse", "owl",
           "pig", "rabbit", "sheep", "snake", "swan", "wolf")  # fmt: skip
FOODS = ("bread", "butter", "cake", "cheese", "cherry", "fish", "honey", "lemon", "melon", "milk", "onion", "pepper", "plum",
         "potato", "rice", "salt", "soup", "sugar", "tea", "tomato")  # fmt: skip
CITIES = ("Athens", "Berlin", "Bern", "Cairo", "Dublin", "Geneva", "Helsinki", "Lima", "Lisbon", "London", "Madrid", "Oslo",
          "Paris", "Prague", "Rome", "Seoul", "Sofia", "Tokyo", "Vienna", "Warsaw")  # fmt: skip
JOBS = (
    "baker",
    "doctor",
    "driver",
    "farmer",
    "gardener",
    "nurse",
    "painter",
    "pilot",
    "sailor",
    "singer",
    "tailor",
    "teacher",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = tuple(sorted({*NOUNS, *ANIMALS, *FOODS, *COLOURS, *JOBS}))
"""What is sorted, spelled, and written on pictures."""


def she(name: str) -> str:
    """The pronoun of a name, as the first word of a sentence."""
    return "She" if name in SHE else "He"


def his(name: str) -> str:
    """The possessive of a name."""
    return "her" if name in SHE else "his"


def single(things: str) -> str:
    """One of some things."""
    if things in ("boxes",):
        return things[:-2]
    return things[:-1]


def counted(number: int, things: str) -> str:
    """A number of things: ``1 apple``, ``2 apples``."""
    return f"{number} {single(things) if number == 1 else things}"


def listed(words: list[str], last: str = "and") -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
