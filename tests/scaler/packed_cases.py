"""A model of a few small variables, trained with packing and without."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import by_hand

import scaler
from scaler import clusters, packed

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "excluded": lambda: without_decay(keras.optimizers.AdamW(0.01, weight_decay=0.5)),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_shrinkage_regularization_strength=0.1
    ),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}
SHAPES = ((3, 4), (4, 2), (6,), (2, 3, 2), ())
BAD = 2
"""The step whose gradients have an infinity."""


def without_decay(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["weight_1", "weight_3"])
    return optimizer


def make_five_enough(monkeypatch):
    """Five small variables are compiled and packed as hundreds are."""
    monkeypatch.setattr(clusters, "_WORTH_COMPILING", 1)
    monkeypatch.setattr(packed, "_FEWEST", 2)


class Run:
    """A model of small variables, and what trains it."""

    def __init__(self, make=OPTIMIZERS["Adam"], pack=True, clip_norm=None, dtype="float32"):
        rng = np.random.default_rng(0)
        self.model = [
            keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"weight_{number}")
            for number, shape in enumerate(SHAPES)
        ]
        self.optimizer, self.loss_scaler = make(), by_hand(scaler.Static(8.0))
        self.masters = scaler.MasterWeights(self.model)
        self.pack, self.clip_norm, self.dtype = pack, clip_norm, dtype
        self.step, self.jitted = tf.function(self.apply), tf.function(self.apply, jit_compile=True)
        self.by_hand_in_a_function = tf.function(self.by_hand)
        self.count = 0

    def apply(self, grads):
        with pytest.MonkeyPatch.context() as patch:
            if not self.pack:
                patch.setattr(packed, "_FEWEST", 10**9)
            return self.loss_scaler.apply(self.optimizer, grads, self.masters, clip_norm=self.clip_norm).finite

    def by_hand(self, grads):
        self.optimizer.apply([tf.cast(grad, tf.float32) for grad in grads], self.masters.weights)
        self.masters.write()

    def grads(self, loss_scale=8.0):
        rng = np.random.default_rng(self.count)
        values = [rng.normal(size=shape) * loss_scale for shape in SHAPES]
        if self.count == BAD and loss_scale != 1.0:
            values[1][0, 0] = np.inf
        self.count += 1
        return [tf.constant(value, self.dtype) for value in values]

    def train(self, steps=1):
        for _ in range(steps):
            self.step(self.grads())
        return self

    @property
    def kept(self):
        """What may lie in buffers, as TensorFlow's variables."""
        masters = self.masters.weights if self.dtype != "float32" else []
        return [*(variable.value for variable in self.optimizer.variables), *masters]

    @property
    def in_buffers(self):
        return bool(vars(self.optimizer)[packed._ATTRIBUTE]._in_buffers)

    def state(self):
        variables = [*self.model, *self.masters.weights, *self.optimizer.variables]
        return [tf.convert_to_tensor(variable).numpy() for variable in variables]


def same_bits(ours, theirs):
    return all(one.tobytes() == other.tobytes() for one, other in zip(ours, theirs, strict=True))


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        # Last bits of a master decide which way it is rounded.
        rtol = 2e-5 if one.dtype == np.float32 else 1e-2
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=rtol, atol=1e-6)


def numpy_of(run):
    return [variable.numpy() for variable in run.kept]


def own_variables(run):
    store = {}
    run.optimizer.save_own_variables(store)
    return list(store.values())


def enumerated(values):
    return ((str(number), value) for number, value in enumerate(values))
