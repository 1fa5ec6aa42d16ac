"""Sources of batches that are no `tf.data` pipelines, and a step whose state depends on every batch and its place."""

import contextlib
import json

import numpy as np
import tensorflow as tf

import loops


class Numbered:
    """An iterator like Grain's, of the batches 1, 2, ...; it can fail, wait, or change their length."""

    def __init__(self, count=10**6, *, failing=None, waiting=None, lengths=(2,)):
        self.count, self.failing, self.waiting, self.lengths = count, failing, waiting, lengths
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.count:
            raise StopIteration
        self.given += 1
        if self.given == self.failing:
            raise KeyError("a broken record")
        if self.waiting is not None and self.given == self.waiting[0]:
            self.waiting[1].wait()
        return np.full(self.lengths[self.given % len(self.lengths)], self.given, np.float32)

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]


class InBytes(Numbered):
    """As a Grain `DataLoader`'s iterator."""

    def get_state(self):
        return json.dumps(super().get_state()).encode()

    def set_state(self, state):
        super().set_state(json.loads(state))


class Loader:
    """As torchdata's: the iterable has the state, and the next iterator begins there."""

    def __init__(self, count=10**6):
        self.count, self.begin, self.given = count, 0, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.given, self.begin = self.begin, 0
        while self.given < self.count:
            self.given += 1
            yield [np.full(2, self.given, np.float32)]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.begin = state_dict["given"]


def plain(count=10**6):
    """A generator, which has no state."""
    yield from (np.full(2, number, np.float32) for number in range(1, count + 1))


def dataset(count):
    """The batches of `Numbered` from `tf.data`."""
    return tf.data.Dataset.from_tensor_slices(np.arange(1, count + 1, dtype=np.float32).repeat(2).reshape(count, 2))


class Run:
    """A loop over a source with a step that changes with the order of its batches, and what it saw."""

    def __init__(self, source, *, steps_per_call=1, folder=None, every=100, strategy=None, background=False):
        with strategy.scope() if strategy else contextlib.nullcontext():
            self.weight = tf.Variable(0.5, aggregation=tf.VariableAggregation.MEAN)
        self.losses, self.visits = [], []
        saves = [loops.Checkpoint(folder, every=every, resume=True, background=background)] if folder else []
        self.loop = loops.Loop(
            self._step, source, steps_per_call=steps_per_call, actions=[self._see, *saves], strategy=strategy
        )

    def _step(self, batch):
        batch = batch[0] if isinstance(batch, tuple) else batch
        return {"loss": self.weight.assign(0.9 * self.weight + tf.sin(tf.reduce_sum(batch)))}

    def _see(self, visit):
        self.visits.append(visit.counters.data)
        self.losses += visit.outputs["loss"].tolist()

    def go(self, steps):
        self.loop.run(steps)
        return self

    @property
    def position(self):
        """What a checkpoint would hold of the source."""
        return self.loop.position.described()["source"]["state"]


def without_end(folder):
    """A run that somebody else kills."""
    Run(Numbered(), steps_per_call=3, folder=folder, every=5).go(10**6)


def expected(count, lengths=(2,)):
    """The losses of the first steps over `Numbered`, as TensorFlow computes them one by one."""
    weight, losses = tf.constant(0.5), []
    for number in range(1, count + 1):
        batch = tf.fill([lengths[number % len(lengths)]], float(number))
        weight = 0.9 * weight + tf.sin(tf.reduce_sum(batch))
        losses.append(float(weight))
    return losses
