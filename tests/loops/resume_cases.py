"""Runs to stop and to go on with, in this process or in another, where `main` is called.

Each has dropout, BatchNorm, shuffling beyond an epoch, float16 with masters, and a batch that overflows.
"""

import hashlib
import json
import shutil
import typing

import keras
import numpy as np
import tensorflow as tf
from models import squared_error, stateful_model
from replica_cases import components, mirrored

import loops
import scaler

STOP, END = 5, 10


class Case(typing.NamedTuple):
    """A run; the batch numbered `bad`, from 1, overflows."""

    replicas: int = 1
    steps_per_call: int = 1
    accumulate: int = 1
    bad: int = STOP
    written: bool = False
    background: bool = False


# With windows of two, the one that ends at the fourth batch is skipped, and the fifth is saved in mid-window.
# Every pair of a number of replicas, a kind of loop and a window or none is in one of them.
CASES = {
    "skip just before": Case(steps_per_call=5, background=True),
    "hand-written": Case(accumulate=2, bad=4, written=True),
    "python on 2": Case(replicas=2, accumulate=2, bad=4),
    "graph on 2": Case(replicas=2, steps_per_call=4, accumulate=2, bad=4, background=True),
}


class Run:
    """One run with its parts at hand. Everything of it is made anew, as a new process would."""

    def __init__(self, case, folder=None, resume=False, actions=(), dataset=None):
        keras.utils.clear_session()  # The same names each time, by which a skip is kept.
        strategy = mirrored(case.replicas) if case.replicas > 1 else None
        with strategy.scope() if strategy else tf.init_scope():
            self.model = stateful_model("float16")
            self.optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
            self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**4, growth_interval=3))
            self.step = loops.TrainStep(
                self.model, squared_error, self.optimizer, loss_scaler=self.loss_scaler, accumulate=case.accumulate
            )
        self.losses = {}
        self.checkpoint = (
            [loops.Checkpoint(folder, every=100, resume=resume, background=case.background)] if folder else []
        )
        self.loop = loops.Loop(
            noisy(self.step) if case.written else self.step,
            batches(case.bad) if dataset is None else dataset,
            steps_per_call=case.steps_per_call,
            strategy=strategy,
            jit_compile=False,  # XLA could not compile it, as it draws numbers: the loop need not trace it to find out.
            actions=[self._collect, *actions, *self.checkpoint],
        )

    def go(self, steps):
        self.loop.run(steps)
        return self

    def _collect(self, visit):
        for number, loss in enumerate(visit.outputs["loss"], visit.first):
            self.losses[str(number)] = np.float32(loss).tobytes().hex()

    def variables(self):
        """All of them, found without the code under test."""
        masters = self.step.masters.weights
        window = self.step.window.variables if self.step.window else ()
        return [*self.model.variables, *self.optimizer.variables, *masters, *self.loss_scaler.variables, *window]

    def fingerprint(self):
        """The losses from STOP on, every component of every variable, the counters and the batch that comes next."""
        parts = [part for one in components(self.variables()) for part in one]
        return {
            "losses": {number: loss for number, loss in self.losses.items() if int(number) > STOP},
            "variables": [hashlib.sha256(part.tobytes()).hexdigest()[:16] for part in parts],
            "counters": str(self.loop.counters),
            "next": next(self.loop.position.iterator)[0].numpy().tobytes().hex()[:64],
        }


def batches(bad):
    """Seven batches in an order that differs between epochs; `bad` counts them as they are taken."""
    random = np.random.default_rng(5)
    x = random.normal(size=(56, 4)).astype(np.float32)
    y = random.normal(size=(56, 1)).astype(np.float32)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(56, seed=3).repeat().batch(8, drop_remainder=True)

    def spoil(number, batch):
        inputs, targets = batch
        return tf.where(tf.equal(number, bad), tf.constant(np.inf, tf.float32), 1.0) * inputs, targets

    return tf.data.Dataset.zip((tf.data.Dataset.range(1, 10**6), shuffled)).map(spoil).prefetch(2)


def noisy(step):
    """A function that hides its parts, and draws from TensorFlow's global generator."""

    def train_step(batch):
        x, y = batch
        return step((x + 0.1 * tf.random.get_global_generator().normal(tf.shape(x)), y))

    return train_step


def prepare(seed):
    """As a process that was not told to be like another: its random numbers start elsewhere."""
    keras.utils.set_random_seed(seed)
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))


def first(folder, name):
    """The case to its end: what it comes to. Its checkpoint is kept as it was where the other stops."""
    prepare(1)
    run = Run(CASES[name], folder / "whole" / name).go(STOP)
    shutil.copytree(folder / "whole" / name, folder / name)
    return run.go(END).fingerprint()


def second(folder, name):
    """The case from where it stopped to its end."""
    prepare(2)
    return Run(CASES[name], folder / name, resume=True).go(END).fingerprint()


def main(place, name):
    """The second part, in a process that has not used TensorFlow yet; what it finds is left there."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    (place / f"{name}.json").write_text(json.dumps(second(place, name)))
