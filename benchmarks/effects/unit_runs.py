"""Runs of a small transformer with a loss scale, or unit-scaled, each traced once for all seeds and learning rates."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops import tasks
from loops.step.train_step import TrainStep
from loops.tasks import TextTask
from loops.tasks.text import ALPHABET

_KIND = "activation_gradients"
_CALLS = 10
"""How often a run is looked at."""
BATCH, CONTEXT, WIDTH, BLOCKS = 16, 32, 32, 1
_HEADS = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        policy: The Keras dtype policy.
        unit: Whether the network is unit-scaled.
        strategy: Chooses the loss scale.
        cast: Whether the operands of products are cast to float8 without a scale: E4M3, and E5M2 for gradients.
        counted: Whether the gradients of activations are counted.
    """

    policy: str
    unit: bool
    strategy: scaler.Strategy = dataclasses.field(default_factory=scaler.NoScaling)
    cast: bool = False
    counted: bool = False


class Course(NamedTuple):
    """A run.

    Attributes:
        loss: The held-out loss in the end, in nats.
        counts: Int64 [looks, bins], the gradients of activations by exponent; empty unless counted.
        skipped: The share of steps that were skipped.
    """

    loss: float
    counts: np.ndarray
    skipped: float


class UnitRuns:
    """A `TrainStep` of the transformer in one way.

    Args:
        way: How it is trained.
        steps: The steps of each run.
    """

    def __init__(self, way: Way, steps: int):
        self._way, self._each = way, max(steps // _CALLS, 1)
        self._calls = max(steps // self._each, 1)
        self._task = _task()
        self._model = self._network()
        self._loss = scaler.formats.unit_cross_entropy if way.unit else self._task.loss
        self._optimizer = keras.optimizers.Adam()
        self._scaler = scaler.LossScaler(way.strategy)
        watch = scaler.observe.watch(self._model, kinds=[_KIND]) if way.counted else None
        self._step = TrainStep(self._model, self._loss, self._optimizer, loss_scaler=self._scaler, probes=watch)
        self._take = tf.function(self._taken)
        self._test = tf.function(lambda inputs, labels: self._task.loss(labels, self._model(inputs)))
        self._start: list[np.ndarray] = []

    def run(self, seed: int, rate: float) -> Course:
        """Trains from new weights.

        Args:
            seed: Determines the initial weights and the batches.
            rate: Adam's learning rate.
        """
        data = iter(self._task.dataset(BATCH, seed).batch(self._each, drop_remainder=True))
        first = next(data)
        variables = self._variables(first)
        if not self._start:
            self._start = [tf.convert_to_tensor(variable).numpy() for variable in variables]
        for variable, value in zip(variables, self._start, strict=True):
            variable.assign(value)
        keras.utils.set_random_seed(seed)
        for variable, fresh in zip(self._model.variables, self._network().variables, strict=True):
            variable.assign(fresh)
        self._optimizer.learning_rate = rate
        counts, skipped, stacked = [], 0.0, first
        for number in range(self._calls):
            seen, applied = self._take(stacked)
            counts.append(seen.numpy())
            skipped += 1 - float(applied)
            stacked = next(data) if number < self._calls - 1 else stacked
        return Course(self._held_out(), np.array(counts), skipped / self._calls)

    def _variables(self, stacked: Any) -> list:
        self._take.get_concrete_function(stacked)
        return [*self._model.variables, *self._optimizer.variables, *self._scaler.variables]

    def _taken(self, stacked: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Some steps, of which the first is counted, and the share that was applied."""
        counts, applied = tf.zeros([0], tf.int64), tf.constant(0.0)
        out = self._step(tf.nest.map_structure(lambda part: part[0], stacked))
        if self._way.counted:
            counts = tf.reduce_sum(out["counts"], axis=0)
        applied = tf.cast(out["applied"], tf.float32)
        for number in tf.range(1, self._each):
            out = self._step(tf.nest.map_structure(lambda part, number=number: part[number], stacked))
            applied += tf.cast(out["applied"], tf.float32)
        return counts, applied / float(self._each)

    def _held_out(self) -> float:
        task = self._task
        size = task.test_examples * task.context
        text = tf.constant(task.test_characters[: size + 1].astype(np.int32))
        return float(self._test(*(tf.reshape(part, [-1, task.context]) for part in (text[:-1], text[1:]))))

    def _network(self) -> keras.Model:
        model = self._task.model(self._way.policy)
        if self._way.cast:
            scaler.formats.emulated("float8_e4m3fn", scaling=UNSCALED)(model)
        return scaler.formats.unit_scaled(model) if self._way.unit else model


UNSCALED = scaler.DelayedAmax(1.0, history_length=1, min_scale=1.0, max_scale=1.0)
"""A scale that has nowhere to go: 1."""


@dataclasses.dataclass(frozen=True)
class _Text(TextTask):
    """The small transformer without positions: what follows a causal mask tells them apart."""

    def model(self, policy: str, attend: type[keras.layers.MultiHeadAttention] | None = None) -> keras.Model:
        layers = keras.layers
        inputs = keras.Input([self.context], dtype="int32")
        x = layers.Embedding(len(ALPHABET), self.width, dtype=policy)(inputs)
        for _ in range(self.blocks):
            normal = layers.LayerNormalization(dtype=policy)(x)
            heads = _HEADS, self.width // _HEADS
            attention = (attend or layers.MultiHeadAttention)(*heads, dtype=policy, flash_attention=False)
            x = layers.Add(dtype=policy)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=policy)(x)
            hidden = layers.Dense(4 * self.width, activation="gelu", dtype=policy)(normal)
            x = layers.Add(dtype=policy)([x, layers.Dense(self.width, dtype=policy)(hidden)])
        logits = layers.Dense(len(ALPHABET), dtype=policy)(layers.LayerNormalization(dtype=policy)(x))
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits), name=self.name)


def _task() -> _Text:
    task = tasks.load("text")
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return _Text(**{**fields, "context": CONTEXT, "width": WIDTH, "blocks": BLOCKS})
