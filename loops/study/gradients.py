"""Where a run's gradients lie on float16's number line, seen through a float32 twin of its model."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.loop.visit import Visit
from loops.tasks import ImageTask

LOWEST, HIGHEST = -60, 20
"""The exponents with bins, as floor(log2|g|); values beyond are in the end bins."""


@dataclasses.dataclass
class GradientCounts:
    """Counts of gradient values over the visits of a run.

    Attributes:
        histogram: Int64 [HIGHEST - LOWEST + 1], values by floor(log2|g|) of the *unscaled* float32 gradient.
        scaled_histogram: The same for the gradient times the loss scale in use at that visit.
        zero: The number of values that are zero in float32; the histograms leave them out.
        nonzero: The number of all other values.
        flushed: How many of `nonzero` float16 makes zero at the loss scale in use.
        overflowed: How many of `nonzero` float16 makes infinite at the loss scale in use.
    """

    histogram: np.ndarray
    scaled_histogram: np.ndarray
    zero: int = 0
    nonzero: int = 0
    flushed: int = 0
    overflowed: int = 0

    @classmethod
    def empty(cls) -> GradientCounts:
        """Counts of zero."""
        bins = HIGHEST - LOWEST + 1
        return cls(np.zeros(bins, np.int64), np.zeros(bins, np.int64))

    def as_dict(self) -> dict:
        """The counts as JSON values."""
        share = self.flushed / self.nonzero if self.nonzero else None
        counts = {name: np.asarray(value).tolist() for name, value in dataclasses.asdict(self).items()}
        return {**counts, "lowest_exponent": LOWEST, "flushed_share": share}


class GradientProbe:
    """Counts the gradients of a fixed batch, by weights and by activations, in a float32 twin of the model.

    A float16 run cannot show what it loses; a twin with the same weights can. One probe serves a whole study, so its
    graph is traced once: `counting` gives an action for a run.
    """

    def __init__(self, task: ImageTask, examples: int = 64, *, unit_scaled: bool = False):
        twin = task.model("float32")
        self._twin = scaler.formats.unit_scaled(twin) if unit_scaled else twin
        self._loss = scaler.formats.unit_cross_entropy if unit_scaled else task.loss
        self._images = tf.constant(task.images[:examples])
        self._labels = tf.constant(task.labels[:examples])
        self._format = scaler.float_format("float16")
        self._count = tf.function(self._count_all)

    def counting(self, model: keras.Model, loss_factor: float) -> GradientAction:
        """An action that counts the gradients of `model` at each visit."""
        return GradientAction(self, model, loss_factor)

    def count(self, model: keras.Model, loss_factor: float, loss_scale: float) -> dict[str, dict[str, np.ndarray]]:
        """Counts at the model's current weights: a dict each for "weights" and "activations"."""
        for twin_layer, layer in zip(self._twin.layers, model.layers, strict=True):
            # An emulated layer has its scales behind the variables of its own.
            for twin, variable in zip(twin_layer.variables, layer.variables, strict=False):
                twin.assign(keras.ops.cast(variable, twin.dtype))
        counted = self._count(tf.constant(loss_factor, tf.float32), tf.constant(loss_scale, tf.float32))
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), counted)

    def _count_all(self, loss_factor: tf.Tensor, loss_scale: tf.Tensor) -> dict[str, dict[str, tf.Tensor]]:
        weights = self._twin.trainable_variables
        with tf.GradientTape() as tape:
            hidden, activations = self._images, []
            for layer in self._twin.layers:
                hidden = layer(hidden, training=True)
                activations.append(hidden)
            loss = self._loss(self._labels, hidden) * loss_factor
        by_weight, by_activation = tape.gradient(loss, (weights, activations))
        return {
            "weights": self._count_list(by_weight, loss_scale),
            "activations": self._count_list(by_activation, loss_scale),
        }

    def _count_list(self, grads: list, loss_scale: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.concat([tf.reshape(grad, [-1]) for grad in grads], axis=0)
        scaled = values * loss_scale
        return {
            "histogram": _histogram(values),
            "scaled_histogram": _histogram(scaled),
            "zero": tf.math.count_nonzero(tf.equal(values, 0.0)),
            "nonzero": tf.math.count_nonzero(values),
            "flushed": tf.math.count_nonzero(self._format.underflows(scaled)),
            "overflowed": tf.math.count_nonzero(self._format.overflows(scaled)),
        }


class GradientAction:
    """The counts of one run, filled at each visit whose weights are finite."""

    def __init__(self, probe: GradientProbe, model: keras.Model, loss_factor: float):
        self._probe, self._model, self._factor = probe, model, loss_factor
        self.counts = self.nothing()

    @staticmethod
    def nothing() -> dict[str, GradientCounts]:
        """The counts of a run before its first visit."""
        return {"weights": GradientCounts.empty(), "activations": GradientCounts.empty()}

    def __call__(self, visit: Visit) -> None:
        """Counts the gradients at the loss scale of the last step."""
        if not all(np.isfinite(np.asarray(v, np.float32)).all() for v in self._model.trainable_variables):
            return
        counted = self._probe.count(self._model, self._factor, float(visit.outputs["loss_scale"][-1]))
        for kind, counts in self.counts.items():
            for field, value in counted[kind].items():
                setattr(counts, field, getattr(counts, field) + value)


def _histogram(values: tf.Tensor) -> tf.Tensor:
    nonzero = tf.boolean_mask(values, tf.not_equal(values, 0.0))
    bits = tf.bitwise.bitwise_and(tf.bitcast(nonzero, tf.int32), 0x7FFFFFFF)
    exponents = tf.bitwise.right_shift(bits, 23) - 127
    return tf.math.bincount(tf.clip_by_value(exponents, LOWEST, HIGHEST) - LOWEST, minlength=HIGHEST - LOWEST + 1)
