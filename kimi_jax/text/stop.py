"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through until one of the stop strings is complete, however the pieces cut it.

    No character of a stop string gets out. The string that is complete first wins; of two that end at the same
    character the longer one does. Text that might begin a stop string is held until that is decided.

    Attributes:
      found: the stop string that ended the text, or None.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """Raises ValueError for a stop string that is empty, and TypeError for one that is not a string."""
        wanted = [stops] if isinstance(stops, str) else list(stops)
        for number, stop in enumerate(wanted):
            if not isinstance(stop, str):
                raise TypeError(f"stop[{number}] is of type {type(stop).__name__}; a stop string is a string")
            if not stop:
                raise ValueError(f"stop[{number}] is empty; a stop string has at least one character")
        self.found: str | None = None
        self._stops = sorted(set(wanted), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text so far ends with
        self._held = ""

    def push(self, text: str) -> str:
        """What can be sent now. Nothing more gets out after a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            for number, stop in enumerate(self._stops):
                matched = self._step(number, text[position])
                if matched == len(stop):
                    self.found, self._held = stop, ""
                    return text[: position + 1 - matched]
        held = max(self._matched, default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held, once no more text will come."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, number: int, character: str) -> int:
        stop, matched = self._stops[number], self._matched[number]
        while matched and stop[matched] != character:
            matched = self._borders[number][matched - 1]
        self._matched[number] = matched = matched + (stop[matched] == character)
        return matched


def _borders(stop: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its end (Knuth, Morris and Pratt)."""

    def longer(border: int, position: int) -> int:
        while border and stop[border] != stop[position]:
            border = borders[border - 1]
        return border + (stop[border] == stop[position])

    borders = [0]
    for position in range(1, len(stop)):
        borders.append(longer(borders[-1], position))
    return borders
