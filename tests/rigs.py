"""Steps that many tests run, with all their variables at hand: compared by bytes, set back to their start."""

import keras
import numpy as np
import tensorflow as tf
from models import batch, squared_error

import loops
import scaler


class Batches(keras.callbacks.Callback):
    """What `fit` shows after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})


def raw(*groups):
    """The bytes of all variables in lists of variables: equal only if every bit is, also of NaN and -0."""
    return [np.asarray(variable).tobytes() for group in groups for variable in group]


def assert_finite(variables):
    """Fails with the name of a variable that holds NaN or an infinity."""
    for variable in variables:
        value = np.asarray(variable)
        if value.dtype.kind not in "iub":
            assert np.isfinite(value.astype(np.float64)).all(), (variable.name, value)


class Written:
    """The README's step: a model, its masters, its optimizer and its scaler, and what one batch does to them."""

    def __init__(self, model, optimizer, loss_scaler, share=1.0, **arguments):
        self.model, self.optimizer, self.loss_scaler = model, optimizer, loss_scaler
        self.masters = scaler.MasterWeights(model.trainable_variables)
        self.share, self.arguments = share, arguments

    def take(self, x, y):
        """The loss and the outcome."""
        before = scaler.snapshot(self.model.non_trainable_variables)
        with tf.GradientTape() as tape:
            loss = squared_error(y, self.model(x, training=True)) * self.share
            scaled = self.loss_scaler.scale(loss)
        grads = tape.gradient(scaled, self.model.trainable_variables)
        return loss, self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before, **self.arguments)

    def agreed(self):
        """What is the same on every replica."""
        return [*self.model.trainable_variables, *self.masters.weights, *getattr(self.optimizer, "variables", [])]

    def moved(self):
        """What a skipped step must not move."""
        return [*self.agreed(), *self.model.non_trainable_variables]


class Rig:
    """A compiled `TrainStep` whose variables can all be listed, and set back to where they started."""

    def __init__(self, model, optimizer, loss_fn=squared_error, example=None, **arguments):
        self.step = loops.TrainStep(model, loss_fn, optimizer, **arguments)
        self.call = tf.function(self.step)
        # Masters, slots and windows are created while the step is traced.
        self.call.get_concrete_function(tuple(map(tf.constant, batch())) if example is None else example)
        self._start = [variable.numpy() for variable in self.variables()]

    def weights(self):
        """What is the same on every replica: weights, masters, slots."""
        masters = self.step.masters.weights if self.step.masters else []
        return [*self.step.model.trainable_variables, *masters, *getattr(self.step.optimizer, "variables", [])]

    def moved(self):
        """What a skipped step must not move."""
        return [*self.weights(), *self.step.model.non_trainable_variables]

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


@tf.autograph.experimental.do_not_convert
def scales_of(strategy, finite):
    """The scales after each step, for words of the shape [steps] or [steps, words]."""
    steps, shape = tf.shape(finite)[0], tf.shape(finite)[1:]
    state = strategy.init()
    state = type(state)(*(tf.broadcast_to(value, shape) for value in state))

    def step(number, state, scales):
        state = strategy.update(state, scaler.Event(finite[number]))
        return number + 1, state, scales.write(number, state.loss_scale)

    start = [0, state, tf.TensorArray(tf.float32, steps)]
    return tf.while_loop(lambda number, *_: number < steps, step, start)[2].stack()
