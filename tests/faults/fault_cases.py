"""What the fault tests share: a float16 model and a step whose every part can be spoiled, in four modes and two styles.

A batch is `(x, y, factor)`. `x` and `y` spoil data and loss; `factor` multiplies the gradient on its way back and
leaves the loss alone, so that infinities, NaN, 1e20 and zeros can be put into a healthy backward pass.
"""

import functools

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from rigs import assert_finite, raw

import loops
import scaler

# Every mode and both styles.
RIGS = (("composed", "eager"), ("by hand", "graph"), ("composed", "loop"), ("by hand", "xla"))


def of_rigs(*places):
    """Some of the rigs."""
    return pytest.mark.parametrize("rig", [RIGS[place] for place in places], indirect=True, ids="-".join)


def batch(seed=0, *, x=None, y=None, factor=1.0):
    """Inputs [8, 4], targets [8, 1] and the factor; `x` and `y` replace one number in the data."""
    inputs, targets = models.batch(seed)
    if x is not None:
        inputs[3, 1] = x
    if y is not None:
        targets[3, 0] = y
    return inputs, targets, np.float32(factor)


def batches(*seeds):
    """Healthy batches."""
    return [batch(seed) for seed in seeds]


@tf.custom_gradient
def spoil_gradient(value, factor):
    """`value`, whose gradient is multiplied by `factor`."""
    return tf.identity(value), lambda grad: (grad * factor, tf.zeros_like(factor))


def loss_fn(y, prediction, factor):
    """Mean squared error in float32."""
    return models.squared_error(y, spoil_gradient(tf.cast(prediction, tf.float32), factor))


def run_in(mode, step):
    """A function from a list of batches to a list of the step's outputs, as NumPy scalars, run in a mode."""
    compiled = {"eager": step, "graph": tf.function(step), "xla": tf.function(step, jit_compile=True)}

    def one_by_one(given):
        outputs = [compiled[mode](*(tf.constant(part) for part in one)) for one in given]
        return [{name: value.numpy() for name, value in output.items()} for output in outputs]

    return one_by_one if mode != "loop" else _in_graph_loop(step)


def _in_graph_loop(step):
    inner = tf.function(step)

    def loop(*parts):
        specs = [tf.TensorSpec(part.shape[1:], part.dtype) for part in parts]
        outputs = inner.get_concrete_function(*specs).structured_outputs
        arrays = {name: tf.TensorArray(spec.dtype, tf.shape(parts[0])[0]) for name, spec in outputs.items()}
        for number in tf.range(tf.shape(parts[0])[0]):
            outputs = inner(*(part[number] for part in parts))
            arrays = {name: array.write(number, outputs[name]) for name, array in arrays.items()}
        return {name: array.stack() for name, array in arrays.items()}

    traced = []

    def run(given):
        if not given:
            return []
        stacked = [tf.stack(part) for part in zip(*given, strict=True)]
        if not traced:
            signature = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in stacked]
            traced.append(tf.function(loop, input_signature=signature))
        outputs = {name: value.numpy() for name, value in traced[0](*stacked).items()}
        return [{name: value[number] for name, value in outputs.items()} for number in range(len(given))]

    return run


class Rig:
    """A training set-up that can be spoiled, inspected by bytes and set back to its start.

    The strategy's numbers are variables, so that one compiled step serves every floor, ceiling and interval.
    """

    def __init__(self, style, mode):
        self.low, self.high, self.initial = (tf.Variable(value) for value in (2.0**-14, 2.0**40, 2.0**10))
        # TensorFlow keeps variables of int32 off GPUs, where XLA cannot read them.
        self.interval = tf.Variable(2000, dtype=tf.int64)
        self.mode, self.model = mode, models.stateful_model("float16")
        self.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.metric = keras.metrics.Mean()
        self.loss_scaler = scaler.LossScaler(
            scaler.Dynamic(self.initial, min_scale=self.low, max_scale=self.high, growth_interval=self.interval)
        )
        if style == "by hand":
            self.masters, step = scaler.MasterWeights(self.model.trainable_variables), self._by_hand
        else:
            self._step = loops.TrainStep(self.model, loss_fn, self.optimizer, loss_scaler=self.loss_scaler)
            self.masters, step = self._step.masters, self._composed
        self.optimizer.build(self.masters.weights)
        self._start = self.values()
        self.run = run_in(mode, step)

    def _by_hand(self, x, y, factor):
        before = scaler.snapshot(self.model.non_trainable_variables + self.metric.variables)
        with tf.GradientTape() as tape:
            loss = loss_fn(y, self.model(x, training=True), factor)
            scaled = self.loss_scaler.scale(loss)
        self.metric.update_state(loss)
        grads = tape.gradient(scaled, self.model.trainable_variables)
        outcome = self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before)
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    def _composed(self, x, y, factor):
        outputs = self._step((x, y, factor))

        def count():
            self.metric.update_state(outputs["loss"])

        tf.cond(outputs["applied"], count, lambda: None)
        return {name: outputs[name] for name in ("loss", "applied", "loss_scale")}

    def variables(self):
        """What a skipped step must not move: weights, masters, slots, moving statistics, seeds and the metric."""
        return [*self.model.variables, *self.masters.weights, *self.optimizer.variables, *self.metric.variables]

    def values(self):
        return [variable.numpy() for variable in [*self.variables(), *self.loss_scaler.variables]]

    def bits(self):
        return raw(self.variables())

    def scale(self):
        return float(self.loss_scaler.loss_scale)

    def reset(self, *, low=2.0**-14, high=2.0**40, initial=2.0**10, interval=2000):
        """As if it had just been made, with these bounds."""
        for variable, value in zip([*self.variables(), *self.loss_scaler.variables], self._start, strict=True):
            variable.assign(value)
        for variable, value in ((self.low, low), (self.high, high), (self.initial, initial), (self.interval, interval)):
            variable.assign(value)
        self.loss_scaler._state["loss_scale"].assign(initial)
        if hasattr(self, "_step"):
            # Layers of other cases are alive, and may have been spoiled since.
            self._step._state._spoiled = None
        return self

    def infer(self):
        return self.model(batch(99)[0], training=False).numpy()

    def assert_finite(self):
        assert_finite([*self.variables(), *self.loss_scaler.variables])


@functools.cache
def rig(style, mode):
    """One compiled rig for each style and mode, shared by all files."""
    return Rig(style, mode)
