"""A stand-in for the choice of a latent-attention layer, written down plainly, with a switch for each way to get it wrong."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from kimi_jax.layers.mla import Mla


def rotated(x: np.ndarray, positions: np.ndarray, *, pairs: bool) -> np.ndarray:
    """Rotary positions over the last dimension: neighbouring channels as pairs, or the two halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(len(positions), *[1] * (x.ndim - 2), half)
    first, second = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    one, two = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.stack([one, two], axis=-1).reshape(x.shape) if pairs else np.concatenate([one, two], axis=-1)


@dataclass
class PlainSelect:
    """Stands for ``Mla._select`` of one sequence; without a switch it is right."""

    absolute_weights: bool = False
    softmax_weights: bool = False
    sigmoid_weights: bool = False
    clipped_weights: bool = False
    no_weights: bool = False
    relu_after_the_sum: bool = False
    relu_after_the_weight: bool = False
    no_relu: bool = False
    rotated_halves: bool = False
    rotated_pairs: bool = False
    one_too_few: bool = False
    one_too_many: bool = False
    itself_left_out: bool = False
    itself_forced: bool = False
    first_token_forced: bool = False
    ties_to_the_larger_position: bool = False
    sliding_window: bool = False
    later_positions_too: bool = False
    smallest_scores: bool = False
    absolute_scores: bool = False
    one_choice_for_all_layers: bool = False
    keys_shifted_by_one: bool = False

    chosen: Any = None

    def __call__(self, layer: Mla, query_latent: Any, weights: Any, positions: Any, cache: Any, pages: Any) -> Any:
        if self.one_choice_for_all_layers and self.chosen is not None:
            return self.chosen
        q = np.asarray(layer.indexer.ask(query_latent, layer.q_a_layernorm), np.float64)[0]
        w, at = np.asarray(weights, np.float64)[0], np.asarray(positions)[0]
        k = layer.indexer.sizes.top_k - self.one_too_few + self.one_too_many
        scores = self._candidates(self._scores(q, w, np.asarray(cache.index.keys, np.float64)[0], at), at)
        order = np.argsort(-scores, axis=-1, kind="stable")
        if self.ties_to_the_larger_position:
            order = scores.shape[1] - 1 - np.argsort(-scores[:, ::-1], axis=-1, kind="stable")
        order = order[:, :k]
        order = np.where(np.take_along_axis(scores, order, axis=-1) == -np.inf, -1, order)
        self.chosen = jnp.asarray(order[None], jnp.int32)
        return self.chosen

    def _scores(self, q: np.ndarray, w: np.ndarray, keys: np.ndarray, at: np.ndarray) -> np.ndarray:
        if self.keys_shifted_by_one:
            keys = np.roll(keys, 1, axis=0)
        if self.rotated_halves or self.rotated_pairs:
            q = rotated(q, at, pairs=self.rotated_pairs)
            keys = rotated(keys, np.arange(len(keys)), pairs=self.rotated_pairs)
        product = np.einsum("thd,sd->ths", q, keys)
        relu = (
            product if self.no_relu or self.relu_after_the_sum or self.relu_after_the_weight else np.maximum(product, 0)
        )
        weighted = self._weights(w)[..., None] * relu
        if self.relu_after_the_weight:
            weighted = np.maximum(weighted, 0)
        scores = weighted.sum(axis=1) + 0.0
        return np.maximum(scores, 0) if self.relu_after_the_sum else scores

    def _weights(self, w: np.ndarray) -> np.ndarray:
        if self.softmax_weights:
            return np.exp(w) / np.exp(w).sum(axis=-1, keepdims=True)
        if self.sigmoid_weights:
            return 1 / (1 + np.exp(-w))
        if self.no_weights:
            return np.ones_like(w)
        return np.abs(w) if self.absolute_weights else np.maximum(w, 0) if self.clipped_weights else w

    def _candidates(self, scores: np.ndarray, at: np.ndarray) -> np.ndarray:
        columns, own = np.arange(scores.shape[1]), at[:, None]
        scores = np.abs(scores) if self.absolute_scores else -scores if self.smallest_scores else scores
        if self.sliding_window:
            scores = np.broadcast_to(columns.astype(float), scores.shape)
        if self.itself_left_out:
            scores = np.where((columns == own) & (own > 0), -np.inf, scores)
        if self.itself_forced:
            scores = np.where(columns == own, 1e30, scores)
        if self.first_token_forced:
            scores = np.where(columns == 0, 1e30, scores)
        return scores if self.later_positions_too else np.where(columns <= own, scores, -np.inf)
