"""What the tests of the loops share: batches, healthy and not, cheap steps, and a scale that never moves."""

import keras
import models
import numpy as np
import tensorflow as tf

import loops
import scaler


def batch(seed=0, count=8, bad=None):
    """Inputs [count, 4] and targets [count, 1] in float32; `bad` is put in one place of the inputs."""
    x, y = models.batch(seed, count)
    if bad is not None:
        x[count // 2, 1] = bad
    return tf.constant(x), tf.constant(y)


def dataset(count, size=8, bad=()):
    """`count` batches, those with a number in `bad` (from 0) with an infinity in them."""
    batches = [batch(number, size, np.inf if number in bad else None) for number in range(count)]
    return tf.data.Dataset.from_tensor_slices(tuple(tf.stack(part) for part in zip(*batches, strict=True)))


def numbers(count=100):
    """The numbers 1.0, 2.0, ... as batches."""
    return tf.data.Dataset.from_tensor_slices(np.arange(1, count + 1, dtype=np.float32))


def summing():
    """The cheapest step with a state, which adds its batches up, and its sum."""
    total = tf.Variable(0.0)
    return (lambda number: {"loss": total.assign_add(number)}), total


def taking(*actions, steps_per_call=1):
    """A loop over zeros with a state, for what its actions do."""
    taken = tf.Variable(0)

    def step(batch):
        taken.assign_add(1)
        return {"loss": tf.cast(tf.reduce_sum(batch), tf.float32)}

    data = tf.data.Dataset.from_tensors(np.zeros([100], np.int64)).repeat()
    return loops.Loop(step, data, steps_per_call=steps_per_call, actions=actions)


class Recorder:
    """An action that keeps every visit."""

    def __init__(self):
        self.visits = []

    def __call__(self, visit):
        self.visits.append(visit)

    def column(self, name):
        return np.concatenate([visit.outputs[name] for visit in self.visits])


def static(loss_scale):
    """A loss scaler whose scale never moves."""
    return scaler.LossScaler(scaler.Static(loss_scale))


def line(kind="float32"):
    """The smallest model of `batch`: one kernel of four numbers."""
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, use_bias=False, dtype=kind, name="line")])


def afresh(step, data, **arguments):
    """A loop that is traced once: the function puts everything back, and gives it with other data and actions."""
    loop = loops.Loop(step, data, **arguments)
    variables = [one for group in loop.state({}, actions=()).groups.values() for one in group]
    start = [one.numpy() for one in variables]

    def again(data, *actions):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        loop.restart(data, actions)
        return loop

    return again


class Traced:
    """The step of a `Rig` for any number of loops: traced once, it is called in the graph of each.

    To a loop it is a step of one's own. What a loop does to a `TrainStep` alone needs a `TrainStep`.
    """

    def __init__(self, rig):
        self.call, self.model, self.optimizer = rig.call, rig.step.model, rig.step.optimizer
        self.loss_scaler = rig.step.loss_scaler

    def __call__(self, x, y):
        return self.call((x, y))
