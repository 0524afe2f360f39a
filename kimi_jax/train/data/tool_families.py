"""The tools of the tool-call tasks: each under several names, with several names for its arguments.

Names differ from one example to the next, so that they must be read from the declaration and cannot be known by heart.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kimi_jax.train.data.words import CITIES, COLOURS, DAYS, FOODS, PEOPLE, THINGS


class Said(NamedTuple):
    """An argument and how the user says it."""

    value: Any
    words: str


Draw = Callable[[random.Random], Said]


@dataclass(frozen=True)
class Param:
    """One argument of a tool.

    Attributes:
      names: one of which the declaration uses.
      schema: of its value.
      draw: a value.
      phrase: for an optional argument, what the user adds to ask for it; empty for a required one.
    """

    names: tuple[str, ...]
    schema: Mapping[str, Any]
    draw: Draw
    phrase: str = ""


@dataclass(frozen=True)
class Family:
    """One tool in all its spellings.

    Attributes:
      names: one of which the declaration uses.
      about: its description.
      params: by the names that the sentences below use.
      asks: ways to ask for it.
      results: what it may answer; ``{n}`` is a number.
      final: what the model tells the user, with ``{result}``.
      most: largest number of a result.
      computes: for a tool whose result follows from its arguments, that number.
    """

    names: tuple[str, ...]
    about: str
    params: Mapping[str, Param]
    asks: tuple[str, ...]
    results: tuple[str, ...]
    final: str
    most: int = 30
    computes: Callable[[Mapping[str, Any]], int] | None = None


def _whole(low: int, high: int, *, limits: bool = False) -> tuple[dict[str, Any], Draw]:
    def draw(chance: random.Random) -> Said:
        number = chance.randint(low, high)
        return Said(number, str(number))

    return {"type": "integer", **({"minimum": low, "maximum": high} if limits else {})}, draw


def _one_of(*words: str) -> tuple[dict[str, Any], Draw]:
    return {"type": "string", "enum": list(words)}, _text(words)[1]


def _text(words: tuple[str, ...]) -> tuple[dict[str, Any], Draw]:
    def draw(chance: random.Random) -> Said:
        word = chance.choice(words)
        return Said(word, word)

    return {"type": "string"}, draw


def _switch(yes: str, no: str) -> tuple[dict[str, Any], Draw]:
    def draw(chance: random.Random) -> Said:
        value = chance.random() < 0.5
        return Said(value, yes if value else no)

    return {"type": "boolean"}, draw


def _people(chance: random.Random) -> Said:
    names = chance.sample(PEOPLE, chance.randint(1, 3))
    return Said(names, " and ".join(names))


def _point(chance: random.Random) -> Said:
    x, y = chance.randint(0, 99), chance.randint(0, 99)
    return Said({"x": x, "y": y}, f"x {x} and y {y}")


def _amount(chance: random.Random) -> Said:
    cents = chance.randint(100, 99_999)
    value = cents / 100 if chance.random() < 0.5 else cents // 100
    return Said(value, str(value))


def _computed(values: Mapping[str, Any]) -> int:
    left, right = values["left"], values["right"]
    return {"plus": left + right, "minus": left - right, "times": left * right}[values["sign"]]


_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
_TEXTS = ("lunch is ready", "come home", "see you tomorrow", "bring the keys", "call me back", "the train is late",
          "good night", "buy bread and milk", "the door is open", "i am on the boat")  # fmt: skip
_TITLES = ("lunch", "tennis", "school", "piano", "dentist", "call", "dinner", "party", "chess", "swim")

FAMILIES = (
    Family(
        ("get_weather", "weather", "forecast"),
        "Weather of a city.",
        {
            "city": Param(("city", "place", "town"), *_text(CITIES)),
            "days": Param(("days", "number_of_days"), *_whole(2, 9), " for {days} days"),
            "unit": Param(("unit", "scale"), *_one_of("celsius", "fahrenheit"), " in {unit}"),
        },
        ("What is the weather in {city}{days}{unit}?", "Weather in {city}{days}{unit}, please.",
         "Tell me the weather in {city}{days}{unit}.", "How is the weather in {city}{days}{unit}?",
         "Get the weather in {city}{days}{unit}."),
        ("rain, {n} degrees", "sun, {n} degrees", "snow, {n} degrees", "wind, {n} degrees"),
        "The weather in {city}: {result}.",
    ),
    Family(
        ("set_timer", "start_timer", "timer"),
        "Starts a timer.",
        {
            "minutes": Param(("minutes", "length", "duration"), *_whole(1, 60, limits=True)),
            "label": Param(("label", "title"), *_text(FOODS), " for the {label}"),
        },
        ("Set a timer of {minutes} minutes{label}.", "Start a timer of {minutes} minutes{label}.",
         "I need a timer of {minutes} minutes{label}.", "Please set a timer of {minutes} minutes{label}.",
         "Timer of {minutes} minutes{label}, please."),
        ("timer {n} started", "timer {n} runs"),
        "Done: {result}.",
    ),
    Family(
        ("set_light", "light", "switch_light"),
        "Switches the light of a room.",
        {
            "room": Param(("room", "where"), *_one_of("kitchen", "hall", "office", "garden", "cellar")),
            "on": Param(("on", "state"), *_switch("on", "off")),
            "color": Param(("color", "tone"), *_one_of("warm", "cold"), ", {color}"),
        },
        ("Turn the light in the {room} {on}{color}.", "Switch {on} the light in the {room}{color}.",
         "The light in the {room} should be {on}{color}.", "Light {on} in the {room}{color}, please.",
         "Please turn {on} the light in the {room}{color}."),
        ("ok", "done", "light {n} switched"),
        "The light in the {room} is {on}.",
    ),
    Family(
        ("send_message", "message", "write_to"),
        "Sends a message to people.",
        {
            "to": Param(("to", "people", "names"), {"type": "array", "items": {"type": "string"}, "minItems": 1}, _people),
            "text": Param(("text", "body"), *_text(_TEXTS)),
        },
        ('Write "{text}" to {to}.', 'Send {to} the message "{text}".', 'Tell {to}: "{text}".',
         'Please send "{text}" to {to}.', 'Message for {to}: "{text}".'),
        ("sent", "ok", "message {n} sent"),
        "I wrote to {to}.",
    ),
    Family(
        ("calculate", "calculator", "compute"),
        "Calculates with two numbers.",
        {
            "left": Param(("left", "first", "a"), *_whole(100, 9999)),
            "sign": Param(("sign", "operation"), *_one_of("plus", "minus", "times")),
            "right": Param(("right", "second", "b"), *_whole(100, 9999)),
        },
        ("What is {left} {sign} {right}?", "Calculate {left} {sign} {right}.", "How much is {left} {sign} {right}?",
         "Use the tool: {left} {sign} {right}.", "Work out {left} {sign} {right}."),
        ("{n}",),
        "The answer is {result}.",
        computes=_computed,
    ),
    Family(
        ("count_stock", "stock", "find_item"),
        "How many of an item are in stock.",
        {
            "item": Param(("item", "thing", "product"), *_text(THINGS)),
            "color": Param(("color", "paint"), *_text(COLOURS), " in {color}"),
        },
        ("How many {item}{color} are in stock?", "Count the {item}{color} in stock.", "Do we have {item}{color} in stock?",
         "Tell me the stock of {item}{color}.", "Check the stock of {item}{color}."),
        ("{n}", "{n} in stock"),
        "Stock of {item}: {result}.",
        most=99,
    ),
    Family(
        ("find_route", "route", "travel_time"),
        "Time from one city to another.",
        {
            "start": Param(("start", "from", "origin"), *_text(CITIES[::2])),
            "end": Param(("end", "to", "target"), *_text(CITIES[1::2])),
            "mode": Param(("mode", "by"), *_one_of("train", "car", "bike"), " by {mode}"),
        },
        ("How long is the way from {start} to {end}{mode}?", "Find a route from {start} to {end}{mode}.",
         "How do I get from {start} to {end}{mode}?", "Route from {start} to {end}{mode}, please.",
         "I want to go from {start} to {end}{mode}."),
        ("{n} hours",),
        "From {start} to {end} it is {result}.",
    ),
    Family(
        ("book_table", "reserve", "table"),
        "Books a table.",
        {
            "seats": Param(("seats", "guests", "persons"), *_whole(2, 9, limits=True)),
            "hour": Param(("hour", "time"), *_whole(11, 22)),
            "outside": Param(("outside", "open_air"), *_switch("outside", "inside"), ", {outside}"),
        },
        ("Book a table for {seats} at {hour}{outside}.", "A table for {seats} at {hour}{outside}, please.",
         "Please book a table for {seats} at {hour}{outside}.", "I need a table for {seats} at {hour}{outside}.",
         "Reserve a table for {seats} at {hour}{outside}."),
        ("table {n}",),
        "Booked: {result} at {hour}.",
    ),
    Family(
        ("convert_money", "exchange", "convert"),
        "Converts money.",
        {
            "amount": Param(("amount", "sum", "value"), {"type": "number"}, _amount),
            "source": Param(("source", "from", "sold"), *_one_of("EUR", "USD")),
            "target": Param(("target", "to", "bought"), *_one_of("JPY", "GBP", "CHF")),
        },
        ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}.",
         "Change {amount} {source} into {target}.", "What are {amount} {source} in {target}?",
         "I have {amount} {source}. How much is that in {target}?"),
        ("{n}.50", "{n}"),
        "That is {result} {target}.",
        most=999,
    ),
    Family(
        ("add_event", "calendar", "new_event"),
        "Puts an event into the calendar.",
        {
            "title": Param(("title", "name", "what"), *_text(_TITLES)),
            "day": Param(("day", "weekday"), *_one_of(*DAYS)),
            "hour": Param(("hour", "start"), *_whole(7, 21), " at {hour}"),
        },
        ("Put {title} on {day}{hour} into my calendar.", "Add {title} on {day}{hour}.", "I have {title} on {day}{hour}.",
         "Calendar: {title} on {day}{hour}.", "Please add {title} on {day}{hour}."),
        ("event {n} added", "ok"),
        "{title} is on {day}.",
    ),
    Family(
        ("move_robot", "go_to", "drive"),
        "Moves the robot to a point.",
        {
            "point": Param(("point", "goal", "position"), _POINT, _point),
            "fast": Param(("fast", "quick"), *_switch("fast", "slow"), ", {fast}"),
        },
        ("Move the robot to {point}{fast}.", "Robot, go to {point}{fast}.", "Drive to {point}{fast}.",
         "The robot should go to {point}{fast}.", "Send the robot to {point}{fast}."),
        ("arrived", "arrived after {n} seconds"),
        "The robot: {result}.",
    ),
)  # fmt: skip
