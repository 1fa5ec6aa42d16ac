"""Two lines whose gradients differ by far, under a guard of each: what tests of spikes by tensor share."""

import functools

import keras
import numpy as np
import tensorflow as tf
from rigs import raw

import scaler
from scaler import Dynamic, SpikeGuard

USUAL, SPIKE = (0.5, 80.0), (40.0, 80.0)
"""Slopes of the two lines: the gradient of the first is far smaller, so that the global norm hides its spike."""


def guarded(by_tensor, **arguments):
    inner = Dynamic(2.0**4, growth_interval=4)
    return SpikeGuard(inner, by_tensor=by_tensor, **{"window": 5, "share": 0.4, "loss": False, **arguments})


class Lines:
    """Two lines with masters, Adam's or SGD's slots and a moving state."""

    def __init__(self, by_tensor, execute=tf.function, optimizer=None, clip_norm=None, clip=None, **arguments):
        self.weights = [tf.Variable([1.0, 1.0], dtype=tf.float16, name="small"), tf.Variable([1.0], name="large")]
        self.moving = tf.Variable(0.0, trainable=False)
        self.masters = scaler.MasterWeights(self.weights)
        self.loss_scaler = scaler.LossScaler(guarded(by_tensor) if by_tensor else Dynamic(2.0**4), **arguments)
        self.optimizer = optimizer or keras.optimizers.SGD(2.0**-4, momentum=0.5)
        self.optimizer.build(self.masters.weights)
        self.clipping = {"clip_norm": clip_norm, "clip": clip}
        self.take = execute(self._take)

    def _take(self, slopes):
        before = scaler.snapshot([self.moving])
        with tf.GradientTape() as tape:
            self.moving.assign_add(slopes[0])
            lines = (tf.reduce_sum(tf.cast(own, tf.float32)) * slopes[at] for at, own in enumerate(self.weights))
            scaled = self.loss_scaler.scale(tf.add_n(list(lines)))
        grads = tape.gradient(scaled, self.weights)
        return self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before, **self.clipping)

    def step(self, slopes=USUAL):
        return self.take(tf.constant(slopes))

    def variables(self):
        own = [*self.weights, self.moving, *self.masters.weights, *self.optimizer.variables]
        return [*own, *self.masters.variables, *self.loss_scaler.variables]

    def moved(self):
        return raw(self.weights, [self.moving], self.masters.weights, self.optimizer.variables)


def warmed(*arguments, **options):
    """Lines after five steps."""
    lines = Lines(*arguments, **options)
    assert all(bool(lines.step().finite) for _ in range(5))
    return lines


@functools.cache
def _kept(by_tensor, select, execute):
    lines = warmed(by_tensor, execute, select=select)
    return lines, [np.asarray(variable) for variable in lines.variables()]


def shared(by_tensor, select=None, execute=tf.function):
    """Lines after five steps, which are traced once for all tests."""
    lines, values = _kept(by_tensor, select, execute)
    for variable, value in zip(lines.variables(), values, strict=True):
        variable.assign(value)
    lines.loss_scaler.stuck = scaler.StuckPolicy()
    return lines
