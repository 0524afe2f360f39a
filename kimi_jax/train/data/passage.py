"""Short questions about a short text: who lives where, works as what, keeps which animal and likes which food."""

from kimi_jax.train.data.example import Example, Wording, assistant, user
from kimi_jax.train.data.words import ANIMALS, CITIES, FOODS, JOBS, PEOPLE, she

ASPECTS = {
    "city": (
        CITIES,
        ("{name} lives in {value}.", "{name} has a house in {value}.", "The home of {name} is {value}."),
        ("Where does {name} live?", "In which city does {name} live?", "Where is the home of {name}?",
         "What city is {name} from?", "Which city does {name} live in?"),
        "{name} lives in {value}.",
        "Who lives in {value}?",
    ),
    "job": (
        JOBS,
        ("{name} works as a {value}.", "{name} is a {value}.", "The work of {name} is that of a {value}."),
        ("What is the job of {name}?", "What does {name} work as?", "Which job does {name} have?",
         "What work does {name} do?", "What is {name}?"),
        "{name} is a {value}.",
        "Who is a {value}?",
    ),
    "animal": (
        ANIMALS,
        ("{name} has a {value}.", "{name} keeps a {value}.", "At home {name} has a {value}."),
        ("Which animal does {name} have?", "What animal does {name} keep?", "What animal is at the home of {name}?",
         "Which animal lives with {name}?", "What is the animal of {name}?"),
        "{name} has a {value}.",
        "Who has a {value}?",
    ),
    "food": (
        FOODS,
        ("{name} likes {value}.", "{name} likes to eat {value}.", "The best food for {name} is {value}."),
        ("What does {name} like to eat?", "Which food does {name} like?", "What food is best for {name}?",
         "What does {name} like?", "Which food does {name} eat?"),
        "{name} likes {value}.",
        "Who likes {value}?",
    ),
}  # fmt: skip
"""Aspect of a person -> its values, statements, questions, answer, and the question from the other side."""

FRAMES = (
    "{text}\n{ask}",
    "Read this: {text}\n{ask}",
    "{ask}\n{text}",
    "Text: {text}\nQuestion: {ask}",
    "Here is a story. {text} {ask}",
)
WHO = ("{ask}", "{ask} Tell me the name.", "Please tell me: {ask}", "Name: {ask}", "Give me the name: {ask}")


def passage(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """A question about one of two to four people."""
    chance = wording.chance
    people = chance.sample(PEOPLE, chance.randint(2, 4))
    kinds = chance.sample(list(ASPECTS), chance.randint(1, 3))
    told = {kind: dict(zip(people, chance.sample(ASPECTS[kind][0], len(people)), strict=True)) for kind in kinds}
    sentences = []
    for name in people:
        lines = [chance.choice(ASPECTS[kind][1]).format(name=name, value=told[kind][name]) for kind in kinds]
        sentences.append(_joined(name, lines))
    if chance.random() < 0.5:
        chance.shuffle(sentences)
    kind, name = chance.choice(kinds), chance.choice(people)
    _, _, asks, answer, who = ASPECTS[kind]
    value = told[kind][name]
    sentence = answer.format(name=name, value=value)
    if chance.random() < 0.3:
        frame, form = wording.template(FRAMES, WHO)
        ask, wanted, others = form.format(ask=who.format(value=value)), name, [one for one in people if one != name]
    else:
        frame, form = wording.template(FRAMES, asks)
        ask, wanted, others = form.format(name=name), value, [one for one in told[kind].values() if one != value]
    content = frame.format(text=" ".join(sentences), ask=ask)
    facts = {"told": told, "kind": kind, "name": name, "others": others}
    return Example(
        "passage", (user(content), assistant(sentence, sentence)), wanted, facts, thinking=thinking, effort=effort
    )


def _joined(name: str, lines: list[str]) -> str:
    """Sentences about one person: the second may use a pronoun."""
    if len(lines) > 1 and lines[1].startswith(f"{name} "):
        lines[1] = she(name) + lines[1].removeprefix(name)
    return " ".join(lines)
