"""16-bit weights whose updates are rounded at random.

Zamirai et al. 2020, Revisiting BFloat16 Training (https://arxiv.org/abs/2010.06192), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.backend import replicas
from scaler.errors import InvalidArgument
from scaler.weights.small_updates import round_stochastically
from scaler.weights.without_masters import WithoutMasters, count_for


class StochasticRounding(WithoutMasters):
    """Rounds updated 16-bit weights up or down at random, so that small updates count on average.

        new = (w + update), rounded up with probability (distance to the neighbour below) / (spacing)

    Pass it in place of the variables: `loss_scaler.apply(optimizer, grads,
    scaler.weights.StochasticRounding(variables))`. Save it with the model: it counts applied steps, and the numbers
    it draws depend only on `seed`, the variable's position and that count. So a restored run draws the same ones.

    During an update each weight is held in float32, in `weights`: only the arithmetic differs from masters. It
    needs as much memory as `MasterWeights`.

    Args:
        variables: The model's trainable variables: float16, bfloat16, or float32, which are updated as they are.
        seed: An integer in [0, 2^31).

    Attributes:
        seed: As it was given.

    Raises:
        InvalidArgument: As for `MasterWeights`, and for another seed.
    """

    def __init__(self, variables: Sequence, seed: int = 0, name: str = "stochastic_rounding"):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise InvalidArgument(f"StochasticRounding(seed={seed!r}): expected an integer in [0, 2^31).")
        super().__init__(variables, name)
        self.seed = seed
        with tf.init_scope():
            self._steps = count_for(self.weights[0], "steps")

    def write(self, weights: Sequence | None = None) -> None:
        """Rounds the updated weights into the model's variables.

        Args:
            weights: Those of `weights` to round; all if not given.
        """
        replicas.assign_each(tf.distribute.get_strategy(), self._steps, lambda own: own + tf.constant(1, tf.int64))
        count = tf.identity(self._steps)

        def rounded(position: int, old: tf.Tensor, moved: tf.Tensor) -> tuple[tf.Tensor]:
            seed = tf.stack([tf.constant(self.seed + position * 2**31, tf.int64), count])
            return (round_stochastically(moved, old.dtype, seed),)

        for position in self._positions(weights):
            self._write(position, rounded)
