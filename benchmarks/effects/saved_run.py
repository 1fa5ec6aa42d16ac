"""A float16 network whose run can go back to any of its saves, with another learning rate or other batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from loops.step.train_step import TrainStep

EVERY = 10
"""Steps between two saves; the learning rate and the batches may change at each."""
_WIDTH, _DEPTH = 32, 4
_COLUMNS = ("loss", "loss_scale", "applied")


class Course(NamedTuple):
    """A run, from its first step or from a save.

    Attributes:
        loss: Float32 [steps], the loss of the batch; not finite if the forward pass overflowed.
        scale: Float32 [steps], the loss scale of the step.
        applied: Bool [steps], whether the step moved the weights.
        saves: The values of all variables, by the number of steps that were done before.
        stuck: The step after which the scaler was found stuck, else None.
        accuracy: The accuracy on the held-out digits at the end; an output that is not finite counts as wrong.
    """

    loss: np.ndarray
    scale: np.ndarray
    applied: np.ndarray
    saves: dict[int, list[np.ndarray]]
    stuck: int | None
    accuracy: float


class SavedRun:
    """A `TrainStep` under a strategy, traced once for all seeds, rates and restarts.

    The network has four dense layers of 32 units with leaky ReLU under `mixed_float16` and no normalisation, so that
    activations grow with the weights. Adam updates float32 weights.

    Args:
        strategy: Chooses the loss scale.
    """

    def __init__(self, strategy: scaler.Strategy):
        self._problem = networks.digits()
        self._model = _network()
        self._optimizer = keras.optimizers.Adam()
        self._scaler = scaler.LossScaler(strategy)
        self._step = TrainStep(self._model, _loss, self._optimizer, loss_scaler=self._scaler)
        first = tf.TensorSpec([], tf.int32)
        self._take = tf.function(self._taken, autograph=True).get_concrete_function(first, first)
        self._variables = [*self._model.variables, *self._optimizer.variables, *self._scaler.variables]
        self._start = self._values()

    def run(
        self, rates: Sequence[float], seed: int, at: int = 0, saved: list[np.ndarray] | None = None, batches: int = 0
    ) -> Course:
        """Takes `EVERY` steps at each of the learning rates.

        Args:
            rates: The learning rate until the next save.
            seed: Determines the initial weights and the batches.
            at: The step to begin at.
            saved: The values of a save at that step; None begins with new weights.
            batches: Another number makes other batches of the same data.
        """
        self._put(self._start if saved is None else saved)
        if saved is None:
            self._initialize(seed)
        rows, saves, stuck = [], {}, None
        for number, rate in enumerate(rates):
            done = at + number * EVERY
            saves[done] = self._values()
            self._optimizer.learning_rate = rate
            rows.append(self._take(tf.constant(done), tf.constant(seed + 1000 * batches)).numpy())
            if stuck is None and self._is_stuck():
                stuck = done + EVERY
        loss, scale, applied = np.concatenate(rows).T
        return Course(loss, scale, applied > 0, saves, stuck, self._accuracy())

    def _taken(self, done: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`EVERY` steps, float32 [EVERY, columns]."""
        rows = tf.TensorArray(tf.float32, EVERY)
        for number in tf.range(EVERY):
            drawn = tf.random.stateless_uniform(
                [networks.BATCH], tf.stack([done + number, seed]), 0, self._problem.labels.shape[0], tf.int32
            )
            out = self._step((tf.gather(self._problem.images, drawn), tf.gather(self._problem.labels, drawn)))
            rows = rows.write(number, tf.stack([tf.cast(out[name], tf.float32) for name in _COLUMNS]))
        return rows.stack()

    def _is_stuck(self) -> bool:
        """Whether a `Loop` would end here."""
        try:
            self._scaler.check()
        except scaler.StuckError:
            return True
        return False

    def _accuracy(self) -> float:
        given = self._model(self._problem.test_images).numpy()
        right = np.isfinite(given).all(axis=1) & (given.argmax(axis=1) == self._problem.test_labels.numpy())
        return float(right.mean())

    def _initialize(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for variable in self._model.trainable_variables:
            if len(variable.shape) == 2:
                variable.assign(generator.normal(0, np.sqrt(2 / variable.shape[0]), variable.shape))

    def _values(self) -> list[np.ndarray]:
        return [tf.convert_to_tensor(variable).numpy() for variable in self._variables]

    def _put(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


def _network() -> keras.Model:
    layers, policy = keras.layers, "mixed_float16"
    given = inputs = keras.Input([networks.SIZES[0]])
    for _ in range(_DEPTH):
        given = layers.Dense(_WIDTH, activation="leaky_relu", dtype=policy)(given)
    logits = layers.Dense(networks.SIZES[-1], dtype=policy)(given)
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits))


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
