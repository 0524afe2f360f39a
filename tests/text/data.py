"""The golden chat cases by id, how they are compared, and texts for property tests."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kimi_jax.text.markup import SPELLED
from kimi_jax.text.render import render
from kimi_jax.text.segments import Segment
from kimi_jax.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent.parent / "fixtures" / "chat"
TINY = Tokenizer.from_folder(FOLDER / "tiny-tokenizer")

THINK = "t<|close|>think<|sep|>"
ANSWER = "<|open|>response<|sep|>r<|close|>response<|sep|>"
CALLS = "<|open|>tools<|sep|>"

CHANNELS = [
    # Thinking off: opening the response again counts before any text only (see `plain_answer`).
    ("<|open|>response<|sep|>Hi<|close|>response<|sep|>", False, (None, "Hi")),
    ("\n<|open|>response<|sep|>Hi<|close|>response<|sep|>", False, (None, "Hi")),
    ("Hi<|open|>response<|sep|> you<|close|>response<|sep|>", False, (None, "Hi you")),
    ("<|open|>think<|sep|>no<|close|>think<|sep|><|open|>response<|sep|>Hi", False, (None, "Hi")),
    # A response opened inside the thoughts ends them only if nothing else does.
    (
        "a<|open|>response<|sep|>b<|close|>think<|sep|><|open|>response<|sep|>c",
        True,
        ("a<|open|>response<|sep|>b", "c"),
    ),
    ("a<|open|>response<|sep|>b<|open|>tools<|sep|>c<|close|>think<|sep|>", True, ("a", "b")),
    # Skipped thoughts: also when only the message is closed.
    ("Hi<|close|>message<|sep|>", True, (None, "Hi")),
    ("Hi<|close|>response<|sep|><|close|>think<|sep|><|close|>message<|sep|>", True, (None, "Hi")),
    # No response element.
    ("a<|close|>think<|sep|>b", True, ("a", "b")),
    ("a<|close|>think<|sep|>x<|open|>response<|sep|>b", True, ("a", "b")),
    # What is cut is removed only where the text ends.
    ("a<|close|><|end_of_msg|>b", True, ("a", None)),
    ("a<|close|>think<|sep|><|open|>response<|sep|>b<|close|><|close|>response<|sep|>", True, ("a", "b<|close|>")),
    ("a<|close|>think<|sep|><|open|>response<|sep|>b<|clo", True, ("a", "b<|clo")),
    ("", True, (None, None)),
    ("", False, (None, None)),
]
"""Corners that the golden cases leave out: (text, thinking, (reasoning, content))."""

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
CUTS = st.lists(st.integers(0, 10_000), max_size=12)

_TAGS = ["call", 'call tool="f"<|sep|>', 'argument key="a" type="x"<|sep|>', "json<|sep|>"]
_SOUP = [*SPELLED.markers, *SPELLED.cut_markers, *(f"<|open|>{tag}" for tag in _TAGS), "<|sep|>", "{}", "<|"]
SOUP = st.lists(st.one_of(st.sampled_from(_SOUP), st.text(max_size=4))).map("".join)
"""Markers and parts of them in any order."""


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def cases(name: str) -> dict[str, Any]:
    return {case["id"]: case for case in json.loads((FOLDER / name).read_text())["cases"]}


def golden_prompt(case: dict[str, Any]) -> list[Segment]:
    kwargs = dict(case["kwargs"])
    if "thinking_effort" in kwargs:
        kwargs["effort"] = kwargs.pop("thinking_effort")
    return render(case["messages"], tools=case["tools"], **kwargs)


def parse_options(case: dict[str, Any]) -> dict[str, bool]:
    return {"thinking": case["thinking"], "tools": case["tools_in_request"] and case["tool_choice"] != "none"}


def ids_digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def ordered(text: str) -> Any:
    """JSON for comparison by value and by order of keys."""
    return json.loads(text, object_pairs_hook=lambda pairs: ("object", pairs))


def same_arguments(got: str, expected: str, compare: str) -> bool:
    return got == expected if compare == "raw_arguments" else ordered(got) == ordered(expected)
