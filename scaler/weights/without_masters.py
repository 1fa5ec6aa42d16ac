"""What ways to train 16-bit weights without float32 masters have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend import replicas
from scaler.weights.masters import MasterWeights


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
