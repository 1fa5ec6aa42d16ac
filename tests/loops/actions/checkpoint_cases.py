"""Loops with a `Checkpoint` that several tests of checkpoints run."""

import functools
import tempfile

import keras
import tensorflow as tf
from loop_cases import dataset
from models import one_layer, squared_error

import loops
import scaler


def one_by_one(step, data, checkpoint):
    """A loop without a graph of several steps, which takes longer to trace."""
    return loops.Loop(step, data, steps_per_call=1, actions=[checkpoint])


def training(place, *, model=one_layer, optimizer=None, scaling=None, accumulate=1, clip=None, size=8, **arguments):
    step = loops.TrainStep(
        model(),
        squared_error,
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        loss_scaler=scaler.LossScaler(scaling or scaler.Dynamic(8.0)),
        accumulate=accumulate,
        clip=clip,
    )
    return one_by_one(step, dataset(4, size), loops.Checkpoint(place, every=1, **arguments))


class Counting:
    """A run whose weight is the sum of the numbers it was given, and an action that counts visits."""

    def __init__(self, place, *, actions=(), steps_per_call=1, **arguments):
        self.total = tf.Variable(0.0)
        self.visits, self.place = 0, place
        self.checkpoint = loops.Checkpoint(place, **{"every": 2, **arguments})
        numbers = tf.data.Dataset.range(1, 1000).shuffle(50, seed=1)
        self.loop = loops.Loop(
            self._step, numbers, steps_per_call=steps_per_call, actions=[self.checkpoint, self, *actions]
        )

    def _step(self, number):
        self.total.assign(self.total * 0.9 + tf.cast(number, tf.float32))
        return {"loss": self.total + 0.0}

    def __call__(self, visit):
        self.visits += 1

    def save_state(self):
        return self.visits

    def load_state(self, value):
        self.visits = value

    def go(self, steps):
        self.loop.run(steps)
        return self

    def bits(self):
        return self.total.numpy().tobytes(), self.visits, self.loop.counters


@functools.cache
def twelve_steps():
    """What 12 steps come to that nothing interrupts, and that no thread saves."""
    keras.utils.set_random_seed(0)  # As before each test.
    with tempfile.TemporaryDirectory() as place:
        return Counting(place).go(12).bits()
