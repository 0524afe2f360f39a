"""Runs a batch of requests to their end: prefill in bucketed chunks, then blocks of decode steps on the device."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array

from kimi_jax.cache import Cache
from kimi_jax.engine.buckets import bucket, prefill_calls
from kimi_jax.engine.request import (
    MAX_STOPS,
    Event,
    FinishReason,
    ImageSpan,
    Request,
    check,
    check_ids,
    refuse_extras,
)
from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.loop import BROKEN, LENGTH, RUNNING, STOPPED, Drawn, Limits, Rows, Steps
from kimi_jax.media.prompt import Chunk, Span, call_rows, chunk_rows
from kimi_jax.model import Params
from kimi_jax.ops.sample.api import GREEDY_BELOW, Sampling

FINISH: dict[int, FinishReason] = {STOPPED: "stop", LENGTH: "length", BROKEN: "error"}


class Runner:
    """Holds the parameters and one cache; runs one batch at a time.

    Args:
      steps: the compiled programs.
      params: placed parameters.
      allowed: [vocab] bool, ids that may be drawn.
      chunk: most prompt tokens of one row in one call.
    """

    def __init__(self, steps: Steps, params: Params, allowed: np.ndarray[Any, Any], chunk: int = 512) -> None:
        self.steps, self.params, self.allowed, self.chunk = steps, params, allowed, chunk
        self._caches: dict[int, Cache] = {}

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can hold."""
        return self.steps.capacity

    def logits(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> np.ndarray[Any, Any]:
        """Teacher-forced float32 scores of every position, [tokens, vocab], from an empty state."""
        return np.concatenate(list(self.scored(ids, images)))

    def scored(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Iterator[np.ndarray[Any, Any]]:
        """The same in order, as many positions at a time as one call computes."""
        check_ids(ids, self.steps.config.vocab, self.capacity, images, self.steps.config.hidden)
        rows = self.rows_for(1)
        cache, position = self.lend_cache(rows), 0
        for start in range(0, len(ids), self.chunk):
            part = list(ids[start : start + self.chunk])
            tokens, new = _grid([part] + [[]] * (rows - 1), self.chunk)
            starts = np.full(rows, position, np.int32)
            seen = self.image_rows([images], starts, new, tokens.shape[1])
            score = self.steps.score_images if seen else self.steps.score
            scores, cache = score(self.params, cache, tokens, starts, new, *seen)
            position += len(part)
            yield np.asarray(scores)[0, : len(part)]  # cut on the host: a slice on the device compiles per length
        self.return_cache(rows, cache)

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Runs all requests together and reports ids as blocks end.

        Closing the iterator early stops the work and keeps the engine usable.

        Raises:
          RequestError: a request that cannot be run; nothing has started then.
        """
        for request in requests:
            check(request, self.steps.config.vocab, self.capacity, self.steps.config.hidden)
            refuse_extras(request)
        return self._run(list(requests)) if requests else iter(())

    def _run(self, requests: list[Request]) -> Iterator[Event]:
        batch = self.open(requests)
        try:
            yield from batch.news()
            while batch.open_rows:
                batch.decode()
                yield from batch.news()
        finally:
            batch.close()

    def open(self, requests: Sequence[Request]) -> "Batch":
        """Prefills the prompts of some requests and draws their first ids."""
        return Batch(self, list(requests))

    def image_rows(
        self, images: Sequence[Sequence[ImageSpan]], starts: np.ndarray, new: np.ndarray, width: int
    ) -> tuple[ImageRows] | tuple[()]:
        """The last argument of a call that sees parts of images, and none for one that sees text only.

        Args:
          images: of each row; rows behind the last have none.
          starts: first position of each row, int32 [rows].
          new: positions of each row, int32 [rows].
          width: tokens of the call.
        """
        chunks: list[Chunk | None] = [None] * len(starts)
        for row, spans in enumerate(images):
            places = [Span(int(span.start), span.tokens, span.key) for span in spans]
            chunks[row] = chunk_rows(places, [span.rows for span in spans], int(starts[row]), int(new[row]))
        found = call_rows(chunks, width)
        if found is None:
            return ()
        return (ImageRows(_host(found[0].astype(self.steps.precision.activation, copy=False)), _host(found[1])),)

    def rows_for(self, requests: int) -> int:
        """Batch size for some requests: a power of two times what the layout's batch axis needs."""
        rows = self.steps.parallel.size("batch")
        while rows < requests:
            rows *= 2
        return rows

    def lend_cache(self, rows: int) -> Cache:
        """The cache for a batch size, every row at the start of a new sequence."""
        held = self._caches.pop(rows, None)
        self._caches.clear()
        if held is None:
            return self.steps.new_cache(rows)
        return self.steps.reset(held, np.ones(rows, bool))

    def return_cache(self, rows: int, cache: Cache) -> None:
        """Keeps a cache for the next batch of its size, unless a failed step has consumed it."""
        if not any(array.is_deleted() for array in jax.tree.leaves(cache)):
            self._caches[rows] = cache


class Batch:
    """Some requests under way. Use :meth:`close` when done: the cache goes back to the runner.

    Attributes:
      open_rows: requests that are not finished, as far as :meth:`news` has told.
    """

    def __init__(self, runner: Runner, requests: list[Request]) -> None:
        self._runner, self._steps = runner, runner.steps
        self._count = runner.rows_for(len(requests))
        self._sampling, self._limits, budget = _arguments(requests, self._count, runner.allowed)
        self._random = any(request.temperature >= GREEDY_BELOW for request in requests)
        self.open_rows = set(range(len(requests)))
        self._cache = runner.lend_cache(self._count)
        prompts = [list(r.ids) for r in requests] + [[]] * (self._count - len(requests))
        self._prefill(prompts, [request.images for request in requests], budget)

    def _prefill(self, prompts: list[list[int]], images: list[Sequence[ImageSpan]], budget: Array) -> None:
        runner = self._runner
        chunk, params = runner.chunk, runner.params
        position = np.zeros(self._count, np.int32)
        *ahead, last = prefill_calls([len(prompt) for prompt in prompts], chunk)
        for lengths in ahead:
            tokens, new = _prompt_part(prompts, position, lengths, chunk)
            seen = runner.image_rows(images, position, new, tokens.shape[1])
            extend = self._steps.extend_images if seen else self._steps.extend
            self._cache = extend(params, self._cache, tokens, position, new, *seen)
            position = position + new
        tokens, new = _prompt_part(prompts, position, last, chunk)
        status = np.where(np.arange(self._count) < len(self.open_rows), RUNNING, LENGTH).astype(np.int32)
        rows = Rows(*map(_host, (np.zeros(self._count, np.int32), position, budget, status)))
        seen = runner.image_rows(images, position, new, tokens.shape[1])
        prefill = (self._steps.prefill_images if seen else self._steps.prefill)(random=self._random)
        self._cache, self._rows, self._drawn = prefill(
            params, self._cache, tokens, new, rows, self._sampling, self._limits, *seen
        )

    def decode(self, steps: int | None = None) -> None:
        """One block of decode steps, ``steps`` of them where given."""
        wanted = np.int32(self._steps.block if steps is None else steps)
        self._cache, self._rows, self._drawn = self._steps.decode(random=self._random)(
            self._runner.params, self._cache, self._rows, self._sampling, self._limits, wanted
        )

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """One decode step fed with given ids instead of the drawn ones; returns what the model would draw next."""
        fed = np.concatenate([tokens, np.zeros(self._count - len(tokens), np.int32)])
        # placed as the drawn ids are, and cut on the host: either would otherwise compile programs of its own
        self._rows = self._rows._replace(token=jax.device_put(fed, self._rows.token.sharding))
        self.decode(steps=1)
        return np.asarray(self._drawn.ids)[:, 0]

    def news(self) -> Iterator[Event]:
        """What the last call drew."""
        return _events(self._drawn, self._rows, self.open_rows)

    def close(self) -> None:
        """Ends the batch; unfinished requests are dropped."""
        self._runner.return_cache(self._count, self._cache)


def _prompt_part(
    prompts: list[list[int]], position: np.ndarray, lengths: list[int], chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    parts = [prompt[start : start + n] for prompt, start, n in zip(prompts, position, lengths, strict=True)]
    return _grid(parts, chunk)


def _arguments(requests: list[Request], count: int, allowed: np.ndarray[Any, Any]) -> tuple[Sampling, Limits, Array]:
    """Per-row arrays of a batch; idle rows hold values that do nothing."""

    def column(values: list[Any], dtype: Any, fill: Any) -> Array:
        return _host(np.array(values + [fill] * (count - len(values)), dtype))

    sampling = Sampling(
        column([r.temperature for r in requests], np.float32, 0),
        column([r.top_p for r in requests], np.float32, 1),
        column([r.top_k for r in requests], np.int32, 0),
        column([r.seed for r in requests], np.uint32, 0),
    )
    stops = np.full((count, MAX_STOPS), -1, np.int32)
    for row, request in enumerate(requests):
        stops[row, : len(request.stops)] = request.stops
    return sampling, Limits(_host(allowed), _host(stops)), column([r.max_tokens for r in requests], np.int32, 0)


def _host(values: Any) -> Array:
    """Small arguments as they are: a step takes host arrays, and placing them first would cost a call each."""
    return cast(Array, values)


def _grid(parts: list[list[int]], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged rows as a padded grid of a bucketed width, with their lengths."""
    width = bucket(max(len(part) for part in parts), chunk)
    tokens = np.zeros((len(parts), width), np.int32)
    for row, part in enumerate(parts):
        tokens[row, : len(part)] = part
    return tokens, np.array([len(part) for part in parts], np.int32)


def _events(drawn: Drawn, rows: Rows, open_rows: set[int]) -> Iterator[Event]:
    """Reads one block back, once, and reports it row by row in the order of steps."""
    ids, logprobs, status = jax.device_get((drawn.ids, drawn.logprobs, rows.status))
    for row in sorted(open_rows):
        tokens = [int(i) for i in ids[row] if i >= 0]
        finish = FINISH.get(int(status[row]))
        scores = logprobs[row][ids[row] >= 0].tolist()
        if finish:
            open_rows.discard(row)
        for place, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            last = place == len(tokens) - 1 and finish not in (None, "error")
            yield Event(row, token, score, finish if last else None)
        if finish == "error" or (finish and not tokens):
            yield Event(row, None, 0.0, finish)
