"""One answer under way: what its events add to it, and what they have added up to."""

from collections.abc import Iterable

from kimi_jax.completion import AnswerBuilder, Completion, Piece, Reading
from kimi_jax.engine.request import Event, Request
from kimi_jax.serve.constrain import GuardedGrammar
from kimi_jax.text.stream import CallDelta


class Choice:
    """One of the answers of a request.

    Attributes:
      place: among them.
      finish: why it ended; None before.
      scored: drawn ids that are part of the answer and were not taken out by :meth:`take_scored`; an ending stop id is not.
      drawn: ids drawn for it.
    """

    def __init__(self, place: int, reading: Reading, request: Request) -> None:
        self.place = place
        self.finish: str | None = None
        self.scored: list[Event] = []
        self.drawn = 0
        self._stops = frozenset(reading.stop_ids)
        self._guard = request.grammar if isinstance(request.grammar, GuardedGrammar) else None
        self._builder = AnswerBuilder(reading, len(request.ids))

    @property
    def failure(self) -> str | None:
        """Why the answer cannot be used; None where it can."""
        if self._guard is not None and self._guard.failure is not None:
            return f"The form asked for could not be enforced: {self._guard.failure}"
        return "The model's scores were not finite" if self.finish == "error" else None

    def push(self, events: Iterable[Event]) -> Piece:
        """What some events in order add, as one piece. Events after the end add nothing."""
        pieces = []
        for event in events:
            if self.finish is not None:
                break
            pieces.append(self._builder.push(event))
            self.finish = pieces[-1].finish_reason
            if event.token is not None:
                self.drawn += 1
                if event.token not in self._stops:
                    self.scored.append(event)
        return joined(pieces)

    def take_scored(self) -> list[Event]:
        """The ids since the last time."""
        taken, self.scored = self.scored, []
        return taken

    def completion(self) -> Completion:
        """The whole answer as far as it has come."""
        return self._builder.completion()


def joined(pieces: list[Piece]) -> Piece:
    """Consecutive pieces as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        _joined_calls([call for piece in pieces for call in piece.tool_calls]),
        tuple(token for piece in pieces for token in piece.token_ids),
        pieces[-1].finish_reason if pieces else None,
    )


def _joined_calls(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """News of tool calls with one entry for each call."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        known = calls.get(delta.index)
        calls[delta.index] = (
            CallDelta(known.index, known.id, known.name, known.arguments + delta.arguments) if known else delta
        )
    return tuple(calls.values())
