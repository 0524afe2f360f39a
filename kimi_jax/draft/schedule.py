"""How many drafts of each request are worth verifying (DSpark notes, section 8). Runs on the host, in float64.

Whether a draft is verified must not depend on its own value or on later ones, else the output is biased. Confidence ``j`` is made
before draft ``j`` is drawn, so admitting slots in order of survival is safe; choosing the best cut after looking at all of them is
not, unless the budget was fixed beforehand.
"""

from collections.abc import Callable

import numpy as np

Float64 = np.ndarray
"""A numpy array of float64."""


def survival(confidence: Float64) -> Float64:
    """Probability that every draft up to each place stays, [requests, drafts]; never rises along a row."""
    return np.cumprod(np.asarray(confidence, np.float64), axis=1)


def greedy_prefix(confidence: Float64, speed: Callable[[int], float]) -> np.ndarray:
    """Drafts to verify per request: slots are admitted by survival for as long as throughput does not fall.

    Args:
      confidence: [requests, drafts] of this block, requests of at least one.
      speed: steps per second of the engine at a number of verified rows; fit for a curve that falls smoothly.
    """
    alive = survival(confidence)
    lengths = np.zeros(len(alive), np.int32)
    rows, output = len(alive), float(len(alive))
    throughput = output * speed(rows)
    for request, place in _by_survival(alive):
        grown = output + alive[request, place]
        if grown * speed(rows + 1) < throughput:
            break
        rows, output, throughput = rows + 1, grown, grown * speed(rows + 1)
        lengths[request] += 1
    return lengths


def best_budget(confidence: Float64, speed: Callable[[int], float]) -> int:
    """Slots worth verifying in the next step, from the confidences of the step before.

    Looks past dips, as padded program sizes make them. Only ever feed it what does not depend on the block it is used for: that of
    the step before, and 1 for a request that is new.
    """
    alive = survival(confidence)
    requests = len(alive)
    expected = requests + np.concatenate([[0.0], np.cumsum(np.sort(alive.ravel())[::-1])])
    return int(np.argmax([gain * speed(requests + slots) for slots, gain in enumerate(expected)]))


def admit(confidence: Float64, budget: int) -> np.ndarray:
    """Drafts to verify per request when the ``budget`` slots of highest survival are taken; always prefixes."""
    lengths = np.zeros(len(confidence), np.int32)
    for request, _ in _by_survival(survival(confidence))[:budget]:
        lengths[request] += 1
    return lengths


def _by_survival(alive: Float64) -> list[tuple[int, int]]:
    """Slots, likeliest first. Ties go to the earlier place, then to the earlier request: else a slot could precede its prefix."""
    places = np.ndindex(alive.shape)
    return sorted(places, key=lambda slot: (-alive[slot], slot[1], slot[0]))
