"""16-bit weights that carry their rounding error on to the next update: Kahan summation.

Zamirai et al. 2020, Revisiting BFloat16 Training (https://arxiv.org/abs/2010.06192), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.weights.small_updates import add_compensated, spacing
from scaler.weights.without_masters import WithoutMasters, zeros_for


class KahanWeights(WithoutMasters):
    """Keeps what rounding takes from 16-bit weights in a second 16-bit number for each, and adds it to the next update.

        y = update - c;  new = round(w + y);  c = round((new - w) - y)

    Pass it in place of the variables: `loss_scaler.apply(optimizer, grads, scaler.weights.KahanWeights(variables))`.
    Save it with the model: it holds the compensations c. One that is larger than the distance between two neighbours
    of its weight does not belong to it, as after `set_weights` or at the dtype's largest value, and counts as 0.

    During an update each weight is held in float32, in `weights`: only the arithmetic differs from masters. It
    needs more memory than `MasterWeights`.

    Args:
        variables: The model's trainable variables: float16, bfloat16, or float32, which are updated as they are.

    Raises:
        InvalidArgument: As for `MasterWeights`.
    """

    def __init__(self, variables: Sequence, name: str = "kahan_weights"):
        super().__init__(variables, name)
        with tf.init_scope():
            self._compensations = [zeros_for(master, v.dtype, "compensation") for v, master in self._copies(None)]

    @property
    def compensations(self) -> list:
        """One for each 16-bit variable, of its dtype and shape: by how much the variable is too large."""
        return list(self._compensations)

    def write(self, weights: Sequence | None = None) -> None:
        """Rounds the updated weights into the model's variables, and keeps what that takes away.

        Args:
            weights: Those of `weights` to round; all if not given.
        """
        for position in self._positions(weights):
            self._write(position, _compensated, self._compensations[position])


def _compensated(position: int, old: tf.Tensor, moved: tf.Tensor, compensation: tf.Tensor) -> tuple:
    del position
    update = moved - tf.cast(old, tf.float32)
    own = tf.abs(tf.cast(compensation, tf.float32)) <= spacing(tf.cast(old, tf.float32), old.dtype)
    return add_compensated(old, tf.where(own, compensation, tf.zeros_like(compensation)), update)
