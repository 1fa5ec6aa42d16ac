"""What the tests of replicas share: strategies on logical CPUs, batches that spoil one replica, components' bytes.

A batch is split evenly, in order: replica r of n takes rows [r * size / n, (r + 1) * size / n).
"""

import collections
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

# Scripts that tests start import this, too.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import rigs
from mirrored import mirrored as mirrored
from models import batch, squared_error
from models import plain_model as plain_model

import loops
import scaler

LOSS_SCALE = {"float32": 2.0**100, "float16": 2.0**10}
"""Scales at which ordinary gradients are finite and those of `spoil("gradients")` overflow."""


def spoil(one, where, replica, replicas):
    """The batch with one example of one replica's share changed.

    "gradients" leaves the loss finite and overflows the scaled backward pass; "forward" overflows a float16 forward
    pass; "data" puts a NaN in.
    """
    x, y = (part.copy() for part in one)
    row = replica * len(x) // replicas
    if where == "gradients":
        y[row] = 1e10
    else:
        x[row] = {"forward": 1e30, "data": np.nan}[where]
    return x, y


def components(variables):
    """One array for every component of every variable, in order."""
    parts = []
    for variable in variables:
        native = variable.value if isinstance(variable, keras.Variable) else variable
        held = native.values if isinstance(native, tf.distribute.DistributedValues) else [native]
        parts.append([part.numpy() for part in held])
    return parts


def raw(variables):
    """The bytes of every component: equal only if every bit is."""
    return [[part.tobytes() for part in parts] for parts in components(variables)]


def agree(variables):
    """Whether every component of each variable has the same bytes."""
    return all(len(set(parts)) == 1 for parts in raw(variables))


def shared(loss_scaler):
    """The variables of a scaler that are the same on all replicas."""
    stored = loss_scaler._stored
    return [stored.floats.variable, stored.counts.variable, loss_scaler._kept.variable]


def finite(variables):
    parts = [part for group in components(variables) for part in group]
    return all(np.isfinite(part.astype(np.float64)).all() for part in parts if part.dtype.kind not in "iub")


def assign(variables, values):
    for variable, parts in zip(variables, values, strict=True):
        native = variable.value if isinstance(variable, keras.Variable) else variable
        held = native.values if isinstance(native, tf.distribute.DistributedValues) else [native]
        for part, value in zip(held, parts, strict=True):
            part.assign(value)


class Rig(rigs.Rig):
    """A `TrainStep` in a `Loop` on replicas, fed by hand, whose variables can be listed and set back."""

    def __init__(self, strategy, make_model, make_optimizer, *, steps_per_call=1, size=8, kind="float32", **arguments):
        self.kind, self.steps_per_call = kind, steps_per_call
        self.strategy, self.replicas, self.outputs = strategy, strategy.num_replicas_in_sync, []
        scaling = arguments.pop("scaling", None) or scaler.Dynamic(LOSS_SCALE[kind], max_scale=2.0**126)
        loss_fn = arguments.pop("loss_fn", squared_error)
        with strategy.scope():
            self.model, optimizer = make_model(), make_optimizer()
            self.loss_scaler = scaler.LossScaler(scaling)
            arguments.setdefault("loss_scaler", self.loss_scaler)
            self.step = loops.TrainStep(self.model, loss_fn, optimizer, **arguments)
        self.optimizer = optimizer
        self._feed = collections.deque()
        spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch(size=size))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # Nothing is taken before the loop asks.
        dataset = tf.data.Dataset.from_generator(self._batches, output_signature=spec).with_options(options)
        self.size = size
        self.loop = loops.Loop(
            self.step, dataset, steps_per_call=steps_per_call, strategy=strategy, actions=[self._collect]
        )
        self.run([batch(99, size)] * max(self.step.accumulate, steps_per_call))  # Traces, and makes the slots.
        self.started = int(self.loss_scaler.counters.attempted)
        self._start = components(self.variables())

    def _batches(self):
        while True:
            yield self._feed.popleft()

    def _collect(self, visit):
        self.outputs.append(visit.outputs)

    def run(self, batches):
        """Takes the batches, and returns for each output its values."""
        self._feed.extend(batches)
        self.outputs = []
        self.loop.run(self.loop.counters.data + len(batches))
        return {name: np.concatenate([visit[name] for visit in self.outputs]) for name in self.outputs[0]}

    def reset(self):
        assign(self.variables(), self._start)
