import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.stop import StopStrings
from tests.text.data import CUTS, cut

LETTERS = st.text("ab<", max_size=30)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def run(stops, chunks):
    matcher = StopStrings(stops)
    sent = [matcher.push(chunk) for chunk in chunks]
    return "".join(sent) + matcher.flush(), matcher.found


def naive(stops, text):
    """The text before the stop string that is complete first; of those complete at once, the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, LETTERS, CUTS)
def test_any_cut_gives_what_the_whole_text_gives(stops, text, places):
    assert run(stops, cut(text, places)) == naive(stops, text)  # red when each piece is searched by itself
    assert run(stops, list(text)) == naive(stops, text)


@given(STOPS, LETTERS)
def test_nothing_is_sent_that_may_begin_a_stop_string(stops, text):
    matcher = StopStrings(stops)
    sent = ""
    for at, letter in enumerate(text):
        sent += matcher.push(letter)
        if matcher.found:
            return
        seen = text[: at + 1]
        held = seen[len(sent) :]
        begun = [size for stop in stops for size in range(1, len(stop)) if seen.endswith(stop[:size])]
        assert len(held) == max(begun, default=0)  # red when more is held than must be


def test_the_first_to_be_complete_wins():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")  # red when the shorter of two that end together wins
    assert run(["aab"], ["aaab"]) == ("a", "aab")  # red when a failed match starts over from nothing


def test_nothing_gets_out_after_a_stop_string():
    matcher = StopStrings("stop")
    assert matcher.push("a st") == "a "
    assert matcher.push("op b") == ""
    assert matcher.found == "stop"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_held_text_is_released():
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("a\n") == "a"
    assert matcher.push("\nUse") == ""
    assert matcher.push(" it") == "\n\nUse it"
    assert matcher.push("\n") == ""
    assert matcher.flush() == "\n"


def test_no_stop_strings():
    assert run([], ["a", "b"]) == ("ab", None)


def test_stop_strings_that_do_not_work():
    with pytest.raises(ValueError, match=r"stop\[1\] is empty"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match=r"stop\[0\] is of type int"):
        StopStrings([5])  # type: ignore[list-item]


def test_long_texts_and_stops_take_linear_time():
    matcher = StopStrings(["a" * 10_000 + "b", "a" * 9_999 + "c"])
    assert matcher.push("a" * 200_000) == "a" * 190_000  # red (minutes) when every end is compared anew
