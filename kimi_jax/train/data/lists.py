"""Sorting, counting, comparing and spelling."""

from kimi_jax.train.data.example import Example, Wording, assistant, user
from kimi_jax.train.data.words import WORDS

SORTS = (
    "Sort these {kind}: {items}",
    "Put these {kind} in order: {items}",
    "{items}\nSort the {kind}.",
    "Please sort {items}.",
    "Which order do these {kind} have? {items}",
    "Here are some {kind}: {items}. Sort them.",
    "Give me these {kind} in order: {items}",
    "Can you sort these {kind}? {items}",
)
COUNTS = (
    "How many times is {item} in this list? {items}",
    "Count {item} in: {items}",
    "{items}\nHow often does {item} appear?",
    "Please count how many times {item} is in {items}.",
    "In the list {items}, how often is {item} there?",
    "Here is a list: {items}. How many times does it have {item}?",
    "Count how often {item} appears: {items}",
    "How many {item} are in the list {items}?",
)
COMPARES = (
    "Which is {more}, {left} or {right}?",
    "Which number is {more}: {left} or {right}?",
    "{left} and {right}: which is {more}?",
    "What is {more}, {left} or {right}?",
    "Tell me which is {more}: {left} or {right}.",
    "Of {left} and {right}, which is {more}?",
    "Please compare {left} and {right}. Which is {more}?",
    "Is {left} or {right} {more}?",
)
SPELLS = (
    "Spell {word}.",
    "How do you spell {word}?",
    "Spell the word {word}.",
    "Please spell {word} for me.",
    "Which letters does {word} have?",
    "Can you spell {word}?",
    "Write {word} letter by letter.",
    "What are the letters of {word}?",
)
BACK = (
    "Which word is {letters}?",
    "What do the letters {letters} spell?",
    "{letters}: which word is that?",
    "Put these letters together: {letters}",
    "Make a word from {letters}.",
    "Please read {letters}.",
    "Which word has the letters {letters}?",
    "What word do you get from {letters}?",
)


def spelled(word: str) -> str:
    """The letters of a word."""
    return "-".join(word)


def sort(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """Numbers or words into their order, one after another."""
    chance = wording.chance
    size = chance.randint(3, 6)
    if chance.random() < 0.5:
        numbers = chance.sample(range(1, 100), size)
        kind, items, ordered = "numbers", [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
    else:
        kind, items = "words", chance.sample(WORDS, size)
        ordered = sorted(items)
    ask = wording.one(SORTS).format(kind=kind, items=", ".join(items))
    left, lines = list(items), []
    for item in ordered:
        lines.append(f"First of {' '.join(left)}: {item}")
        left.remove(item)
    answer = ", ".join(ordered)
    facts = {"items": items, "kind": kind}
    reply = assistant(answer, ".\n".join(lines) + ".")
    return Example("sort", (user(ask), reply), answer, facts, thinking=thinking, effort=effort)


def count(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """How often something is in a list: the list again, with a running count."""
    chance = wording.chance
    if chance.random() < 0.5:
        kinds = [str(n) for n in chance.sample(range(1, 10), 3)]
    else:
        kinds = chance.sample(WORDS, 3)
    items = [chance.choice(kinds) for _ in range(chance.randint(4, 9))]
    item = kinds[0]
    ask = wording.one(COUNTS).format(item=item, items=", ".join(items))
    running, steps = 0, []
    for one in items:
        running += one == item
        steps.append(f"{one} {running}")
    answer = items.count(item)
    content = f"{item} is there {answer} time{'' if answer == 1 else 's'}."
    working = ", ".join(steps) + "."
    reply = assistant(content if thinking else f"{working}\n{content}", working)
    facts = {"items": items, "item": item}
    return Example("count", (user(ask), reply), str(answer), facts, thinking=thinking, effort=effort)


def compare(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """The larger or smaller of two numbers; digits are compared from the left."""
    chance = wording.chance
    left = chance.randint(1, 999)
    near = [left + step for step in (-20, -10, -1, 1, 10, 20) if 0 < left + step < 1000]
    right = chance.choice(near) if chance.random() < 0.5 else chance.choice([n for n in range(1, 1000) if n != left])
    more = chance.choice(("larger", "smaller"))
    ask = wording.one(COMPARES).format(more=more, left=left, right=right)
    answer = (max if more == "larger" else min)(left, right)
    other = left + right - answer
    sign = ">" if more == "larger" else "<"
    thoughts = f"{_why(left, right)}, so {answer}{sign}{other}."
    facts = {"left": left, "right": right, "more": more}
    reply = assistant(f"{answer} is {more}.", thoughts)
    return Example("compare", (user(ask), reply), str(answer), facts, thinking=thinking, effort=effort)


def _why(left: int, right: int) -> str:
    first, second = str(left), str(right)
    if len(first) != len(second):
        return f"{left} has {len(first)} digit{'s' * (len(first) > 1)}, {right} has {len(second)}"
    pairs = [f"{a} {b}" for a, b in zip(first, second, strict=True)]
    differ = next(at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return ", ".join(pairs[: differ + 1])


def spell(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """A word to its letters, or letters to their word: what reading a picture is made of."""
    chance = wording.chance
    word = chance.choice(WORDS)
    letters = spelled(word)
    if chance.random() < 0.5:
        ask, answer, content = wording.one(SPELLS).format(word=word), letters, letters
        thoughts = f"{len(word)} letters."
    else:
        ask, answer, content = wording.one(BACK).format(letters=letters), word, word
        thoughts = f"{letters}: {word}."
    reply = assistant(content, thoughts)
    facts = {"word": word, "to": answer}
    return Example("spell", (user(ask), reply), answer, facts, thinking=thinking, effort=effort)
