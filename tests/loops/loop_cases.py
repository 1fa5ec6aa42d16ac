"""What the tests of the loops share: small models, batches, steps with all their variables, comparison by bytes."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler


def plain_model(kind="float32", **arguments):
    """Two dense layers on four numbers, with no state beside the weights; the same weights every time."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input([4], dtype=kind),
            keras.layers.Dense(6, activation="tanh", dtype=kind, **arguments),
            keras.layers.Dense(1, dtype=kind, **arguments),
        ]
    )


def stateful_model(kind="float32", dropout=0.25):
    """The same with BatchNorm and dropout: moving statistics and a seed generator.

    Its variables have the same names each time, by which a skip is kept.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input([4], dtype=kind),
            keras.layers.Dense(6, activation="relu", dtype=kind),
            keras.layers.BatchNormalization(momentum=0.5, dtype=kind),
            keras.layers.Dropout(dropout, seed=3, dtype=kind),
            keras.layers.Dense(1, dtype=kind),
        ]
    )


def squared_error(y, prediction):
    """Mean squared error in float32."""
    return tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y))


def batch(seed=0, count=8, bad=None):
    """Inputs [count, 4] and targets [count, 1] in float32; `bad` is put in one place of the inputs."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(count, 4)).astype(np.float32), random.normal(size=(count, 1)).astype(np.float32)
    if bad is not None:
        x[count // 2, 1] = bad
    return tf.constant(x), tf.constant(y)


def dataset(count, size=8, bad=()):
    """`count` batches, those with a number in `bad` (from 0) with an infinity in them."""
    batches = [batch(number, size, np.inf if number in bad else None) for number in range(count)]
    return tf.data.Dataset.from_tensor_slices(tuple(tf.stack(part) for part in zip(*batches, strict=True)))


def raw(variables):
    """The bytes of variables: equal only if every bit is, also of NaN and -0."""
    return [np.asarray(variable.numpy()).tobytes() for variable in variables]


class Rig:
    """A compiled `TrainStep` whose variables can all be listed, and set back to where they started."""

    def __init__(self, model, optimizer, loss_fn=squared_error, example=None, **arguments):
        self.step = loops.TrainStep(model, loss_fn, optimizer, **arguments)
        self.call = tf.function(self.step)
        # Masters, slots and windows are created while the step is traced.
        self.call.get_concrete_function(batch() if example is None else example)
        self._start = [variable.numpy() for variable in self.variables()]

    def moved(self):
        """What a skipped step must not move: the model, its masters and the optimizer."""
        masters = self.step.masters.weights if self.step.masters else []
        return [*self.step.model.variables, *masters, *getattr(self.step.optimizer, "variables", [])]

    def variables(self):
        """Every variable there is."""
        window = self.step.window.variables if self.step.window else ()
        return [*self.moved(), *self.step.loss_scaler.variables, *window]

    def reset(self):
        """As if the step had just been made."""
        for variable, value in zip(self.variables(), self._start, strict=True):
            variable.assign(value)

    def run(self, batches):
        """Takes the batches, and returns the outputs of each."""
        return [{name: value.numpy() for name, value in self.call(one).items()} for one in batches]

    def all_finite(self):
        """Whether no variable holds NaN or an infinity."""
        values = (np.asarray(variable.numpy()) for variable in self.variables())
        return all(np.isfinite(value.astype(np.float64)).all() for value in values if value.dtype.kind not in "iub")


def static(loss_scale):
    """A loss scaler whose scale never moves."""
    return scaler.LossScaler(scaler.Static(loss_scale))
