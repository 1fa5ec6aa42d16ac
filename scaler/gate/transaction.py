"""An update counts whole and with finite values, or not at all: by a proof, or by a look and a way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import apart, in_xla
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import Optimizer, name_of, variables_of
from scaler.outcome.outcome import Cause, Skip, not_skipped, whole


class Proven:
    """An update that keeps finite values finite at any learning rate up to `rate`: its new values are not looked at.

    Args:
        optimizer: Its learning rate is looked at, if `rate` is finite.
        rate: From `largest_learning_rate`.
    """

    def __init__(self, optimizer: Optimizer, rate: float):
        self._optimizer, self._rate = optimizer, rate

    def sound(self, squared_norm: tf.Tensor) -> tf.Tensor:
        """Whether the gradients' squared norm is finite, and the learning rate is one that the proof is about."""
        if self._rate == float("inf"):
            return tf.math.is_finite(squared_norm)
        rate = tf.cast(self._optimizer.learning_rate, tf.float32)
        if getattr(self._optimizer, "weight_decay", None):
            # By a negative rate weights would not decay but grow, step by step without end.
            rate = tf.where(rate >= 0.0, rate, float("nan"))
        # One check for both: this overflows between one and two times the largest rate.
        return tf.math.is_finite(squared_norm + rate * (2.0**127 / self._rate))

    def holds(self, sound: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Whether the update is to count: it does where the step is sound."""
        del update
        return sound

    def failed(self, sound: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """Whether it is the update's fault that it does not hold, and not the gradients'."""
        del sound
        return tf.math.is_finite(norm)

    def complete(self, update: Callable[[], None]) -> None:
        """Moves the variables."""
        update()

    def reason(self, failed: tf.Tensor, reason: Skip) -> Skip:
        """The reason why it does not count: the learning rate, for which an `index` of -1 stands, or another one.

        Args:
            failed: Scalar bool, from the method.
            reason: What the gradients say.
        """
        of_rate = _because(has_nan=tf.constant(False), index=whole(-1))
        return Skip(*(tf.where(failed, one, other) for one, other in zip(of_rate, reason, strict=True)))


class Transaction:
    """Remembers variables, lets an update move them, and puts every bit back if a value is not finite afterwards.

    A value that was not finite before is not the update's doing.

    Remembering copies nothing, but an update then writes to new memory and not in place.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls. Each replica has its own values.
        optimizer: In an eager update it may make variables of its own.
        kept: All variables that the update may move.
        looked_at: Those of them whose new values have to be finite, of floating dtypes.
        indices: What the `index` of a skip is for each of those.
    """

    def __init__(
        self, strategy: Any, optimizer: Optimizer, kept: Sequence, looked_at: Sequence, indices: Sequence[int]
    ):
        self._strategy, self._optimizer = strategy, optimizer
        self._kept = list({id(own): own for own in map(replicas.native, kept)}.values())
        self._looked_at = [replicas.native(variable) for variable in looked_at]
        self._indices = list(indices)
        self._before = replicas.each(strategy, _values, *self._kept)
        before = {id(variable): value for variable, value in zip(self._kept, self._before, strict=True)}
        self._old = [before[id(variable)] for variable in self._looked_at]
        self._made: list = []

    def sound(self, squared_norm: tf.Tensor) -> tf.Tensor:
        """Whether the gradients' squared norm is finite."""
        return tf.math.is_finite(squared_norm)

    def failed(self, sound: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """Whether it is the update's fault that it does not hold, and not the gradients'."""
        del norm
        return sound

    def holds(self, sound: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Updates where the step is sound, and returns whether it did and all new values are finite, on all replicas.

        Args:
            sound: Scalar bool, the same on all replicas.
            update: Moves variables on every replica.
        """

        def moved() -> tf.Tensor:
            update()
            self._made = self._made_meanwhile()
            old = [*self._old, *map(tf.zeros_like, self._made)]
            flags = replicas.each(self._strategy, _all_finite, [*self._looked_at, *self._made], old)
            return tf.reduce_all(tf.stack(replicas.of_each(self._strategy, flags)))

        return replicas.all_of(self._strategy, tf.cond(sound, moved, lambda: tf.constant(False)))

    def complete(self, update: Callable[[], None]) -> None:
        """Does nothing: the variables have moved already."""
        del update

    def reason(self, failed: tf.Tensor, reason: Skip) -> Skip:
        """The reason why it does not count: what the update has made, which is put back, or another one.

        An `index` of -1 stands for the learning rate.

        Args:
            failed: Scalar bool, from the method.
            reason: What the gradients say.

        Raises:
            InvalidArgument: If the update made variables, which had no values before it.
        """
        return Skip(*tf.cond(failed, self._undo, lambda: reason))

    def _undo(self) -> Skip:
        now, old = ([replicas.of_each(self._strategy, v)[0] for v in one] for one in (self._looked_at, self._old))
        bad = tf.cast(tf.stack(list(map(_spoiled, now, old))), tf.float32)
        nan = tf.stack([tf.reduce_any(tf.math.is_nan(variable)) for variable in now])
        worst = tf.argmax(bad)
        has_nan, index = tf.gather(nan, worst), tf.gather(tf.constant(self._indices, tf.int64), worst)
        # Reads of a variable that is assigned later come first: TensorFlow keeps their order.
        for variable, value in zip(self._kept, self._before, strict=True):
            replicas.assign_each(self._strategy, variable, lambda own, value: value, value)
        if self._made:
            raise InvalidArgument(
                f"apply: {name_of(self._optimizer)} made its variables in this very step, and values that are not "
                "finite with them, which cannot be put back: the weights were. Make the optimizer anew, and have it "
                "make its variables before the first step."
            )
        # A schedule counts steps, so that it is asked once the count is what it was.
        sound = replicas.of_each(self._strategy, replicas.each(self._strategy, lambda: _sound_rate(self._optimizer)))[0]
        return _because(has_nan=tf.logical_and(has_nan, sound), index=tf.where(sound, index, -1))

    def _made_meanwhile(self) -> list:
        if not tf.executing_eagerly():
            return []
        known = {id(variable) for variable in self._kept}
        own = [replicas.native(variable) for variable in variables_of(self._optimizer)]
        return [variable for variable in own if id(variable) not in known and variable.dtype.is_floating]


def _because(*, has_nan: tf.Tensor, index: tf.Tensor) -> Skip:
    return not_skipped()._replace(cause=whole(Cause.UPDATE), has_nan=has_nan, index=index)


def _sound_rate(optimizer: Optimizer) -> tf.Tensor:
    """Whether the learning rate is finite: scalar bool, true for what has none."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return tf.constant(True)
    rates = [each.learning_rate for each in getattr(optimizer, "optimizers", (optimizer,))]
    return tf.reduce_all([tf.math.is_finite(tf.cast(rate, tf.float32)) for rate in rates])


def _values(*variables: Any) -> list[tf.Tensor]:
    return [tf.identity(variable) for variable in variables]


def _all_finite(variables: Sequence, old: Sequence) -> tf.Tensor:
    """Whether no value stopped being finite: one pass over them, unless their squares do not add up."""

    def one_by_one() -> tf.Tensor:
        return tf.logical_not(tf.reduce_any(tf.stack(list(map(_spoiled, variables, old)))))

    if in_xla():
        return one_by_one()
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(variable), tf.float32) for variable in variables])
    return tf.cond(tf.math.is_finite(squares), lambda: tf.constant(True), lambda: apart(one_by_one))


def _spoiled(variable: Any, old: tf.Tensor) -> tf.Tensor:
    """Whether a value is not finite that was before."""
    return tf.reduce_any(tf.logical_and(tf.math.is_finite(old), tf.logical_not(tf.math.is_finite(variable))))
