"""Small runs that diverge, by a planted fault, and small runs that are healthy though their loss or gradients jump.

A run has a problem, a kind and a seed, from which its start, its batches, when its fault begins and how fast it grows
are drawn. The rule of `loops.record.forecast` was chosen on `CHOSEN_ON`; no alarm of `HELD_OUT` was looked at before
the rule was fixed. Its seeds are others, and recurrent networks and attention are only there. How fast the faults of
all problems grow was tried on further seeds, by when they diverge. After that the headroom had to fall all along, so
that larger data is no reason for alarm, and `LARGER` was measured.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import loops
import loops.tasks
import scaler

POLICY = "mixed_float16"
STEPS = 400
PLANTED = ("ramp", "decay", "beta2", "logits", "data")
"""Learning rates that double, weight decay of the wrong sign, a beta2 too small, attention logits that grow, inputs
that grow."""
HEALTHY = ("change", "curriculum", "restarts", "noise")
"""Data of another distribution, harder examples in three stages, warm restarts of the learning rate, label noise. A
fifth kind, "larger", is data that is four times as large."""


class Run(NamedTuple):
    """One run: the same for the same three values."""

    problem: str
    kind: str
    seed: int

    @property
    def planted(self) -> bool:
        """Whether it has a fault."""
        return self.kind in PLANTED

    @property
    def name(self) -> str:
        """That of its file."""
        return f"{self.problem}-{self.kind}-{self.seed}"

    def drawn(self) -> tuple[int, float]:
        """The first step that is unlike those before, and how fast a fault grows, from 0 to 1."""
        rng = np.random.default_rng([self.seed, *self.name.encode()])
        return int(rng.integers(100, 200)), float(rng.uniform())


def _runs(cells: dict[tuple[str, str], range]) -> tuple[Run, ...]:
    return tuple(Run(problem, kind, seed) for (problem, kind), seeds in cells.items() for seed in seeds)


CHOSEN_ON = _runs(
    {("regression", kind): range(3) for kind in PLANTED if kind != "logits"}
    | {("cnn", kind): range(3) for kind in PLANTED if kind != "logits"}
    | {("regression", kind): range(5) for kind in HEALTHY}
    | {("cnn", kind): range(5) for kind in HEALTHY}
)
"""24 planted and 40 healthy."""
HELD_OUT = _runs(
    {("cnn", kind): range(10, 12) for kind in PLANTED if kind != "logits"}
    | {("rnn", kind): range(10, 13) for kind in PLANTED if kind != "logits"}
    | {("attention", kind): range(10, 18 if kind == "logits" else 13) for kind in PLANTED}
    | {(problem, kind): range(10, 15) for problem in ("cnn", "rnn", "attention") for kind in HEALTHY}
)
"""40 planted, eight of each kind, and 60 healthy, fifteen of each."""
LARGER = _runs({(problem, "larger"): range(10, 13) for problem in ("regression", "cnn", "rnn", "attention")})
"""12 healthy."""


def loop_of(run: Run, path: pathlib.Path) -> loops.Loop:
    """The loop of a run before its first step, which writes a trace."""
    keras.utils.set_random_seed(run.seed)
    keras.config.set_dtype_policy(POLICY)
    x, y, model, loss, rate = _PROBLEMS[run.problem]()
    step = loops.TrainStep(model, loss, _optimizer(run, model, rate), probes=scaler.observe.watch(model))
    trace = loops.Trace(path, every=STEPS + 1, window=0)
    return loops.Loop(step, _batches(run, x, y), steps_per_call=50, actions=[trace])


def regression() -> tuple:
    """Two dense layers on a function of 16 numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[2048, 16])
    y = np.tanh(x @ rng.normal(size=[16, 1])) + 0.1 * rng.normal(size=[2048, 1])
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(1), _float32()]
    return x, y[:, 0], keras.Sequential([keras.Input([16]), *layers]), keras.losses.MeanSquaredError(), 2e-2


def cnn() -> tuple:
    """Two convolutions with BatchNorm on digits."""
    block = [keras.layers.Conv2D(8, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    ends = [keras.layers.Conv2D(16, 3, 2, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(10)]
    return *_digits(), keras.Sequential([keras.Input([8, 8, 1]), *block, *ends, _float32()]), _cross_entropy(), 5e-2


def rnn() -> tuple:
    """An unrolled recurrent network that reads the frequency of a noisy wave (Le et al. 2015, arXiv:1504.00941)."""
    rng = np.random.default_rng(1)
    rate, phase = rng.uniform(0.2, 2.0, [2048, 1]), rng.uniform(0, 6.3, [2048, 1])
    x = np.sin(rate * np.arange(16) + phase) + 0.3 * rng.normal(size=[2048, 16])
    cell = keras.layers.SimpleRNN(32, "relu", recurrent_initializer=keras.initializers.Identity(), unroll=True)
    layers = [keras.layers.Reshape([16, 1]), cell, keras.layers.Dense(1), _float32()]
    return x, rate[:, 0], keras.Sequential([keras.Input([16]), *layers]), keras.losses.MeanSquaredError(), 2e-3


def attention() -> tuple:
    """One block of attention over the rows of digits."""
    rows = keras.Input([8, 8, 1])
    x = keras.layers.Dense(24)(keras.layers.Reshape([8, 8])(rows))
    y = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 12, name="attention")(y, y)])
    x = keras.layers.Dense(48, "gelu")(keras.layers.LayerNormalization()(x))
    logits = _float32()(keras.layers.Dense(10)(keras.layers.Flatten()(x)))
    return *_digits(), keras.Model(rows, logits), _cross_entropy(), 3e-3


_PROBLEMS = {one.__name__: one for one in (regression, cnn, rnn, attention)}
_BY_SGD = ("regression", "cnn")


class Doubling(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that doubles every so many steps from one on."""

    def __init__(self, rate: float, onset: int, every: float):
        self.rate, self.onset, self.every = rate, onset, every

    def __call__(self, step):
        late = tf.maximum(tf.cast(step, tf.float32) - self.onset, 0.0)
        return self.rate * tf.pow(2.0, late / self.every)

    def get_config(self) -> dict:
        return {"rate": self.rate, "onset": self.onset, "every": self.every}


class Growing(keras.optimizers.Adam):
    """Adam, which also multiplies some weights from a step on: decay of the wrong sign."""

    def __init__(self, weights: list, onset: int, growth: float):
        super().__init__(3e-3)
        # Keras hands TensorFlow's variables to an update.
        self.chosen = {one.value.ref() for one in weights}
        self.onset, self.growth = onset, growth

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if variable.ref() in self.chosen:
            growth = tf.where(self.iterations + 1 >= self.onset, self.growth, 0.0)
            self.assign_add(variable, growth * tf.convert_to_tensor(variable))


class Forgetful(keras.optimizers.Adam):
    """Adam whose beta2 is too small from a step on."""

    def __init__(self, onset: int, beta_2: float):
        super().__init__(3e-3)
        self.onset, self.late = onset, beta_2

    def update_step(self, gradient, variable, learning_rate):
        usual = self.beta_2
        self.beta_2 = tf.where(self.iterations + 1 >= self.onset, self.late, usual)
        super().update_step(gradient, variable, learning_rate)
        self.beta_2 = usual


def _optimizer(run: Run, model: keras.Model, rate: float) -> keras.optimizers.Optimizer:
    onset, speed = run.drawn()
    if run.kind == "decay":
        # A recurrent network applies its weights 16 times a step.
        return Growing(model.trainable_variables, onset, (0.002 + 0.003 * speed) * (1 if run.problem == "rnn" else 5))
    if run.kind == "logits":
        chosen = [one for one in model.trainable_variables if "/query/" in one.path or "/key/" in one.path]
        return Growing(chosen, onset, 0.01 + 0.02 * speed)
    if run.kind == "beta2":
        return Forgetful(onset, 0.05 + 0.2 * speed)
    if run.kind == "ramp":
        rate = Doubling(rate, onset, 15 + 20 * speed)
    if run.kind == "restarts":
        rate = keras.optimizers.schedules.CosineDecayRestarts(2 * rate, 60 + int(60 * speed), t_mul=1.0)
    return keras.optimizers.SGD(rate, momentum=0.9) if run.problem in _BY_SGD else keras.optimizers.Adam(rate)


def _batches(run: Run, x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    onset, speed = run.drawn()
    if run.kind == "noise":
        # 20 to 40% of the labels are another example's.
        rng = np.random.default_rng(run.seed)
        wrong = rng.uniform(size=len(y)) < 0.2 + 0.2 * speed
        y = np.where(wrong, rng.permutation(y), y)
    if run.kind == "change":
        # Inputs upside down, and other labels.
        other = (y + 3) % 10 if y.dtype.kind == "i" else y.mean() - y
        return _shuffled(run, x, y).take(onset - 1).concatenate(_shuffled(run, x.mean() - x, other))
    if run.kind == "larger":
        return _shuffled(run, x, y).take(onset - 1).concatenate(_shuffled(run, 4 * x, y))
    if run.kind == "curriculum":
        # Only the lower labels at first: classes 0 to 2 or 3, or small targets.
        easy, harder = (_shuffled(run, x[chosen], y[chosen]) for chosen in (y <= np.quantile(y, q) for q in (0.3, 0.6)))
        return easy.take(onset - 1).concatenate(harder.take(onset // 2)).concatenate(_shuffled(run, x, y))
    batches = _shuffled(run, x, y)
    if run.kind == "data":
        per_step = tf.constant(1 / (5 + 7 * speed), tf.float32)

        def grown(step, batch):
            late = tf.maximum(tf.cast(step, tf.float32) + 1 - onset, 0.0)
            return batch[0] * tf.pow(2.0, late * per_step), batch[1]

        batches = batches.enumerate().map(grown)
    return batches


def _shuffled(run: Run, x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    y = y.astype(np.int64 if y.dtype.kind == "i" else np.float32)
    data = tf.data.Dataset.from_tensor_slices((x.astype(np.float32), y))
    return data.shuffle(len(x), seed=run.seed, reshuffle_each_iteration=True).repeat().batch(32)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    task = loops.tasks.load("digits")
    return task.images, task.labels


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _float32() -> keras.layers.Layer:
    return keras.layers.Activation("linear", dtype="float32")
