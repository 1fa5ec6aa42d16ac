"""Ways to train 16-bit weights without float32 masters: updates rounded at random, or with their rounding error kept.

Both are of Zamirai et al. 2020, Revisiting BFloat16 Training (https://arxiv.org/abs/2010.06192): algorithm 1 is
`StochasticRounding`, algorithm 2 is Kahan summation, `KahanWeights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend import replicas
from scaler.errors import InvalidArgument
from scaler.weights.masters import MasterWeights
from scaler.weights.small_updates import add_compensated, round_stochastically, spacing


class WithoutMasters(MasterWeights):
    """What both modes share: float32 `weights`, in which an update is computed, and which keep nothing between steps.

    Before an update they become the 16-bit weights, after it they are rounded into them. The optimizer's slots, which
    have their dtype, are float32.
    """

    compiles = False

    def __init__(self, variables: Sequence, name: str):
        super().__init__(variables, name)
        with tf.init_scope():
            self._wanted = [count_for(master, "wanted") for _, master in self._copies(None)]
            self._lost = [count_for(master, "lost") for _, master in self._copies(None)]

    @property
    def swallowed(self) -> tf.Tensor:
        """The share of the last applied step's non-zero updates that did not change their 16-bit weight.

        Scalar float32; 0 before the first step. `float32` variables swallow nothing that counts here.
        """
        if not self._lost:
            return tf.constant(0.0)
        lost, wanted = (tf.add_n([tf.identity(count) for count in counts]) for counts in (self._lost, self._wanted))
        return tf.cast(lost / tf.maximum(wanted, 1), tf.float32)

    def refresh(self, weights: Sequence | None = None) -> None:
        """Takes over the 16-bit weights, at the beginning of each update.

        Args:
            weights: Those of `weights` to look at; all if not given.
        """
        for variable, master in self._copies(weights):
            replicas.assign_each(tf.distribute.get_strategy(), master, _exact, variable)

    def _write(self, position: int, function: Callable[..., tuple[tf.Tensor, ...]], *others: tf.Variable) -> None:
        """Assigns `function(position, old, master, *others)`, new values for the variable and the `others`."""
        variable, master = self._copies(None)[position]

        def assign(
            own: tf.Variable, master: tf.Variable, wanted: tf.Variable, lost: tf.Variable, *others: tf.Variable
        ) -> None:
            old, moved = tf.identity(own), tf.identity(master)
            new, *kept = function(position, old, moved, *map(tf.identity, others))
            changing = tf.not_equal(moved, tf.cast(old, tf.float32))
            wanted.assign(tf.math.count_nonzero(changing))
            lost.assign(tf.math.count_nonzero(tf.logical_and(changing, tf.equal(old, new))))
            own.assign(new)
            for other, value in zip(others, kept, strict=True):
                other.assign(value)

        values = (master, self._wanted[position], self._lost[position], *others)
        tf.distribute.get_strategy().extended.update(variable, assign, args=values, group=False)

    def _positions(self, weights: Sequence | None) -> list[int]:
        wanted = {id(master) for _, master in self._copies(weights)}
        return [i for i, (_, master) in enumerate(self._copies(None)) if id(master) in wanted]


def _exact(master: tf.Variable, variable: tf.Variable) -> tf.Tensor:
    del master
    return tf.cast(variable, tf.float32)


def _next_to(master: tf.Variable, value: tf.Tensor, name: str) -> tf.Variable:
    """A variable with a component on each replica that `master` has one on."""
    distributed = isinstance(master, tf.distribute.DistributedValues)
    with master.distribute_strategy.scope() if distributed else contextlib.nullcontext():
        return tf.Variable(value, trainable=False, name=name)


def count_for(master: tf.Variable, name: str) -> tf.Variable:
    """A counter on each replica that has the master, int64."""
    return _next_to(master, tf.zeros([], tf.int64), name)


def zeros_for(master: tf.Variable, dtype: str | tf.DType, name: str) -> tf.Variable:
    """Zeros of the shape of the master, on each replica that has it."""
    return _next_to(master, tf.zeros(master.shape, dtype), name)


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
