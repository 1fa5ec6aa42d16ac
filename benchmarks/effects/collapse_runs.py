"""Runs whose learning rate rises until they diverge, what tells first, and runs that go on from their saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.runs import Traced

EVERY = 10
"""Steps between two saves; the learning rate and the batches may change at each."""
_WIDTH, _DEPTH = 32, 4
_COLUMNS = ("loss", "loss_scale", "applied")
RATE = 1e-3
_RAMP = 1.5**30
"""The factor on the learning rate by the end of a run."""
INTERVAL = 50
_LOWEST = 2.0**-126
GUESS = math.log(networks.SIZES[-1])
FALLEN = 2
"""Octaves below its usual value by which a scale has begun to fall."""
RISEN = 2
"""How many times its least mean a loss has when it has risen."""
OPTS_LIMIT = 1.0
"""OPT's authors called a scale healthy from here on."""
OPTS_FLOOR = 2.0**-5
"""The least scale under OPT's own rule."""
BACK = (40, 30, 20, 10, 0)
"""Restart points, in steps before the save that precedes the last applied step."""
WAYS = ("no floor", "a floor of 1", "hysteresis of 4", "metaseq's rule", "SpikeGuard")
NONE, FLOOR, HYSTERESIS, METASEQ, GUARD = WAYS


class Course(NamedTuple):
    """A run, from its first step or from a save.

    Attributes:
        loss: Float32 [steps], the loss of the batch; not finite if the forward pass overflowed.
        scale: Float32 [steps], the loss scale of the step.
        applied: Bool [steps], whether the step moved the weights.
        saves: The values of all variables, by the number of steps that were done before.
        stuck: The step after which the scaler was found stuck, else None.
        accuracy: The accuracy on the held-out digits at the end; an output that is not finite counts as wrong.
    """

    loss: np.ndarray
    scale: np.ndarray
    applied: np.ndarray
    saves: dict[int, list[np.ndarray]]
    stuck: int | None
    accuracy: float


class Fall(NamedTuple):
    """When a run diverged, in steps; the number of all steps for what did not happen.

    Attributes:
        scale: From here on the scale is two octaves below its usual value, or lower.
        limit: From here on the scale is below 1.
        rise: By here the mean loss of `EVERY` steps is twice the least of those before, or not finite, and so is each
            later mean.
        guess: From here on each loss is worse than a guess, or not finite.
        overflow: The first loss that is not finite.
        last: The last applied step, -1 if there is none.
    """

    scale: int
    limit: int
    rise: int
    guess: int
    overflow: int
    last: int


class Restart(NamedTuple):
    """A run from a save: the number of the save, `EVERY` steps each, and what followed."""

    save: int
    course: Course


class Runs(NamedTuple):
    """All runs, with an entry for each seed.

    Attributes:
        calm: The steps before the rate rises.
        growth: The factor on the rate at each save after them.
        ramped: The runs with a rising rate, of each of `WAYS`.
        level: The runs whose rate never rises, without a floor.
        healthy: From before the fall of the scale, at the calm rate.
        limited: From the newest save of the run under OPT's rule at which the scale is `OPTS_LIMIT` or more, at the
            calm rate.
        other: From before the fall of the scale, at the same rates with other batches.
        again: From each of `BACK`, at the calm rate, [seeds][saves].
    """

    calm: int
    growth: float
    ramped: dict[str, list[Course]]
    level: list[Course]
    healthy: list[Restart]
    limited: list[Restart]
    other: list[Restart]
    again: list[list[Restart]]


def train(seeds: int, steps: int) -> Runs:
    """Trains with a learning rate that rises until the run diverges, and then goes back to saves of that run.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    count = max(steps // EVERY, 4)
    calm = count // 4
    rates = [RATE * _RAMP ** (max(number - calm + 1, 0) / (count - calm)) for number in range(count)]
    flat = [RATE] * count
    made = {name: SavedRun(strategy) for name, strategy in _strategies().items()}
    ramped = {name: [each.run(rates, seed) for seed in range(seeds)] for name, each in made.items()}
    plain = made[NONE]
    runs = Runs(calm * EVERY, rates[-1] / rates[-2], ramped, [], [], [], [], [])
    for seed, course in enumerate(ramped[NONE]):
        fall = fall_of(course, runs.calm)
        before = min(fall.scale // EVERY, count - 1)
        ends = [max(max(fall.last, 0) // EVERY - back // EVERY, 0) for back in BACK]
        taken = {at: plain.go_on(course, at, flat, seed) for at in {before, *ends}}
        opts = ramped[METASEQ][seed]
        above = min(fall_of(opts, runs.calm).limit // EVERY, count - 1)
        runs.level.append(plain.run(flat, seed))
        runs.healthy.append(taken[before])
        runs.limited.append(made[METASEQ].go_on(opts, above, flat, seed))
        runs.other.append(plain.go_on(course, before, rates, seed, batches=1))
        runs.again.append([taken[at] for at in ends])
    return runs


def usual_of(course: Course, calm: int) -> float:
    """Log2 of the median scale in the second half of the calm phase, which has so many steps."""
    return float(np.median(np.log2(course.scale[calm // 2 : calm])))


def fall_of(course: Course, calm: int) -> Fall:
    """When a run diverged whose calm phase has so many steps."""
    means = course.loss.reshape(-1, EVERY).mean(axis=1)
    lost = np.flatnonzero(~np.isfinite(course.loss))
    return Fall(
        scale=_for_good(np.log2(course.scale) <= usual_of(course, calm) - FALLEN),
        limit=_for_good(course.scale < OPTS_LIMIT),
        rise=min(EVERY * _for_good(~(means < RISEN * np.fmin.accumulate(means))) + EVERY - 1, len(course.loss)),
        guess=_for_good(~(course.loss <= GUESS)),
        overflow=int(lost[0]) if len(lost) else len(course.loss),
        last=int(np.flatnonzero(course.applied).max(initial=-1)),
    )


def _for_good(wrong: np.ndarray) -> int:
    """The first place from which all are true."""
    fine = np.flatnonzero(~wrong)
    return int(fine.max(initial=-1)) + 1


def _strategies() -> dict[str, scaler.Strategy]:
    def dynamic(min_scale: float = _LOWEST, hysteresis: int = 1) -> scaler.Dynamic:
        return scaler.Dynamic(min_scale=min_scale, growth_interval=INTERVAL, hysteresis=hysteresis)

    metaseq = scaler.presets.metaseq(growth_interval=INTERVAL, min_loss_scale=OPTS_FLOOR)
    ways = (dynamic(), dynamic(1.0), dynamic(hysteresis=4), metaseq, scaler.SpikeGuard(dynamic()))
    return dict(zip(WAYS, ways, strict=True))


class SavedRun(Traced):
    """A `TrainStep` under a strategy, traced once for all seeds, rates and restarts.

    The network has four dense layers of 32 units with leaky ReLU under `mixed_float16` and no normalisation, so that
    activations grow with the weights. Adam updates float32 weights.

    Args:
        strategy: Chooses the loss scale.
    """

    def __init__(self, strategy: scaler.Strategy):
        super().__init__(_network(), _loss, keras.optimizers.Adam(), strategy)
        self._problem = networks.digits()
        self._take = tf.function(self._taken, autograph=True)

    def run(
        self, rates: Sequence[float], seed: int, at: int = 0, saved: list[np.ndarray] | None = None, batches: int = 0
    ) -> Course:
        """Takes `EVERY` steps at each of the learning rates.

        Args:
            rates: The learning rate until the next save.
            seed: Determines the initial weights and the batches.
            at: The step to begin at.
            saved: The values of a save at that step; None begins with new weights.
            batches: Another number makes other batches of the same data.
        """
        self.begin(self._take, tf.constant(0), tf.constant(0))
        if saved is None:
            self._initialize(seed)
        else:
            self.put(saved)
        rows, saves, stuck = [], {}, None
        for number, rate in enumerate(rates):
            done = at + number * EVERY
            saves[done] = self.values()
            self.optimizer.learning_rate = rate
            rows.append(self._take(tf.constant(done), tf.constant(seed + 1000 * batches)).numpy())
            if stuck is None and self._is_stuck():
                stuck = done + EVERY
        loss, scale, applied = np.concatenate(rows).T
        return Course(loss, scale, applied > 0, saves, stuck, self._accuracy())

    def go_on(self, course: Course, save: int, rates: Sequence[float], seed: int, batches: int = 0) -> Restart:
        """A run from one of the saves of another, by its number, with the learning rates that follow it."""
        at = save * EVERY
        return Restart(save, self.run(rates[save:], seed, at, course.saves[at], batches))

    def _taken(self, done: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`EVERY` steps, float32 [EVERY, columns]."""
        rows = tf.TensorArray(tf.float32, EVERY)
        for number in tf.range(EVERY):
            drawn = tf.random.stateless_uniform(
                [networks.BATCH], tf.stack([done + number, seed]), 0, self._problem.labels.shape[0], tf.int32
            )
            out = self.step((tf.gather(self._problem.images, drawn), tf.gather(self._problem.labels, drawn)))
            rows = rows.write(number, tf.stack([tf.cast(out[name], tf.float32) for name in _COLUMNS]))
        return rows.stack()

    def _is_stuck(self) -> bool:
        """Whether a `Loop` would end here."""
        try:
            self.scaler.check()
        except scaler.StuckError:
            return True
        return False

    def _accuracy(self) -> float:
        given = self.model(self._problem.test_images).numpy()
        right = np.isfinite(given).all(axis=1) & (given.argmax(axis=1) == self._problem.test_labels.numpy())
        return float(right.mean())

    def _initialize(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for variable in self.model.trainable_variables:
            if len(variable.shape) == 2:
                variable.assign(generator.normal(0, np.sqrt(2 / variable.shape[0]), variable.shape))


def _network() -> keras.Model:
    layers, policy = keras.layers, "mixed_float16"
    given = inputs = keras.Input([networks.SIZES[0]])
    for _ in range(_DEPTH):
        given = layers.Dense(_WIDTH, activation="leaky_relu", dtype=policy)(given)
    logits = layers.Dense(networks.SIZES[-1], dtype=policy)(given)
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits))


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
