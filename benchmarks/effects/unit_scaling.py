"""Unit scaling against a loss scale: what float16 and float8 flush without one, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects.effect import Found, curve, curves, flat, with_range
from benchmarks.effects.runs import UNSCALED, Traced, by_exponent, flushed, held_out, visible
from loops import tasks
from loops.tasks import TextTask
from loops.tasks.text import ALPHABET

_RATE, _UNIT_RATE = 1e-2, 5e-2
"""Adam's learning rate: of the ordinary network, and of the unit-scaled one."""
BATCH, CONTEXT, WIDTH, BLOCKS = 16, 32, 32, 1
_HEADS = 4
_CALLS = 10
"""How often a run is looked at."""
_EXPONENTS = range(-34, 6)
_FORMATS = {"float16": "float16", "float8_e5m2": "E5M2", "float8_e4m3fn": "E4M3"}
_NORMAL = -0.57
"""Log2 of the median magnitude of a normal law of variance 1: 0.674."""
_NEAR = 0.01
"""Nats: what counts as no worse, on the mean of the differences seed by seed. A yardstick of this page's own."""
_PLAIN, _UNIT = "ordinary", "unit-scaled"
_DYNAMIC = "float16, dynamic scale"
_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        policy: The Keras dtype policy.
        unit: Whether the network is unit-scaled.
        strategy: Chooses the loss scale.
        cast: Whether the operands of products are cast to float8 without a scale: E4M3, and E5M2 for gradients.
        counted: Whether the gradients of activations are counted.
    """

    policy: str
    unit: bool
    strategy: scaler.Strategy = dataclasses.field(default_factory=scaler.NoScaling)
    cast: bool = False
    counted: bool = False


class Course(NamedTuple):
    """A run.

    Attributes:
        loss: The held-out loss in the end, in nats.
        counts: Int64 [looks, bins], the gradients of activations by exponent; empty unless counted.
        skipped: The share of steps that were skipped.
    """

    loss: float
    counts: np.ndarray
    skipped: float


_WAYS: dict[_Key, Way] = {
    (_PLAIN, "float32"): Way("float32", False, counted=True),
    (_PLAIN, "float16"): Way("mixed_float16", False),
    (_PLAIN, _DYNAMIC): Way("mixed_float16", False, scaler.Dynamic(growth_interval=50)),
    (_PLAIN, "float8"): Way("float32", False, cast=True),
    (_UNIT, "float32"): Way("float32", True, counted=True),
    (_UNIT, "float16"): Way("mixed_float16", True),
    (_UNIT, "float8"): Way("float32", True, cast=True),
}


def run(seeds: int, steps: int) -> Found:
    """Trains the small transformer in each way.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    seen = {}
    for key, way in _WAYS.items():
        runs = UnitRuns(way, steps)
        seen[key] = [runs.run(seed) for seed in range(seeds)]
    return found_of(seen)


def found_of(seen: dict[_Key, list[Course]]) -> Found:
    """What these runs show.

    Args:
        seen: The runs of each way, one for each seed.
    """
    losses = {key: np.array([each.loss for each in runs]) for key, runs in seen.items()}
    counts = {kind: np.array([each.counts for each in seen[kind, "float32"]]) for kind in (_PLAIN, _UNIT)}
    first, whole, last = (
        {kind: each[:, part].sum(axis=1) for kind, each in counts.items()}
        for part in (slice(0, 1), slice(None), slice(-1, None))
    )
    medians = {kind: _medians(each) for kind, each in first.items()}
    begins, ends = (flushed(each[_UNIT], "float16") for each in (first, last))
    above = {
        "unit_float16": losses[_UNIT, "float16"] - losses[_UNIT, "float32"],
        "dynamic": losses[_UNIT, "float16"] - losses[_PLAIN, _DYNAMIC],
        "exact": losses[_UNIT, "float32"] - losses[_PLAIN, "float32"],
        "unit_float8": losses[_UNIT, "float8"] - losses[_UNIT, "float32"],
        "float16": losses[_PLAIN, "float16"] - losses[_PLAIN, _DYNAMIC],
    }
    float8 = losses[_PLAIN, "float8"] - losses[_PLAIN, "float32"]
    return Found(
        words={
            "flushed_unit": flushed(whole[_UNIT], "float8_e5m2").mean(),
            "flushed_plain": flushed(whole[_PLAIN], "float8_e5m2").mean(),
            "median": {kind: _power(each) for kind, each in medians.items()},
            "begins": begins,
            "ends": ends,
            **above,
            "float8": float8,
            "bounds": [
                (float(np.log2(scaler.float_format(to).zero_threshold)), f"flushed in {label}")
                for to, label in _FORMATS.items()
            ],
        },
        rows=(
            (
                *key,
                losses[key],
                np.array([each.skipped for each in runs]),
                *(
                    flushed(each[key[0]], to) if _WAYS[key].counted else ""
                    for to in _FORMATS
                    for each in (first, whole)
                ),
            )
            for key, runs in seen.items()
        ),
        holds={
            "median": np.abs(medians[_UNIT] - _NORMAL) <= 2,
            **{
                f"{when}-{to}": flushed(each[_UNIT], to) < flushed(each[_PLAIN], to) / 10
                for to in ("float16", "float8_e5m2")
                for when, each in (("first", first), ("run", whole))
            },
            "constants": ends <= 2 * np.maximum(begins, 1e-5),
            **{key: each.mean() <= _NEAR for key, each in above.items()},
            "more": float8 > above["unit_float8"],
            "worse": float8.mean() > _NEAR,
        },
        lines=[
            curves(_EXPONENTS, {kind: by_exponent(each, _EXPONENTS) for kind, each in first.items()}),
            curves(
                range(len(_FORMATS)),
                {kind: [visible(flushed(each, to)) for to in _FORMATS] for kind, each in whole.items()},
            ),
            [
                curve(
                    kind,
                    [at for at, key in enumerate(_WAYS) if key[0] == kind],
                    [losses[key] - losses[kind, "float32"] for key in _WAYS if key[0] == kind],
                )
                for kind in counts
            ],
        ],
        measured=flat({"loss": {f"{kind}, {name}": values for (kind, name), values in losses.items()}})
        | flat(
            {
                ("flushed", label, when, kind): flushed(values, to)
                for to, label in _FORMATS.items()
                for when, each in (("first step", first), ("run", whole), ("last look", last))
                for kind, values in each.items()
            }
        ),
    )


class UnitRuns(Traced):
    """A `TrainStep` of the transformer in one way.

    Args:
        way: How it is trained.
        steps: The steps of each run.
    """

    def __init__(self, way: Way, steps: int):
        self._way, self._each = way, max(steps // _CALLS, 1)
        self._calls = max(steps // self._each, 1)
        text = tasks.load("text")
        sizes = {"context": CONTEXT, "width": WIDTH, "blocks": BLOCKS}
        self._task = _Text(**{field.name: getattr(text, field.name) for field in dataclasses.fields(text)} | sizes)
        model = self._network()
        loss = scaler.formats.unit_cross_entropy if way.unit else self._task.loss
        watch = scaler.observe.watch(model, kinds=["activation_gradients"]) if way.counted else None
        super().__init__(model, loss, keras.optimizers.Adam(), way.strategy, probes=watch)
        self._take = tf.function(self._taken)
        self._test = tf.function(lambda inputs, labels: self._task.loss(labels, model(inputs)))

    def run(self, seed: int) -> Course:
        """Trains from new weights.

        Args:
            seed: Determines the initial weights and the batches.
        """
        data = iter(self._task.dataset(BATCH, seed).batch(self._each, drop_remainder=True))
        stacked = next(data)
        self.begin(self._take, stacked)
        keras.utils.set_random_seed(seed)
        for variable, fresh in zip(self.model.variables, self._network().variables, strict=True):
            variable.assign(fresh)
        self.optimizer.learning_rate = _UNIT_RATE if self._way.unit else _RATE
        counts, skipped = [], 0.0
        for number in range(self._calls):
            seen, applied = self._take(stacked)
            counts.append(seen.numpy())
            skipped += 1 - float(applied)
            stacked = next(data) if number < self._calls - 1 else stacked
        return Course(float(self._test(*held_out(self._task))), np.array(counts), skipped / self._calls)

    def _taken(self, stacked: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Some steps, of which the first is counted, and the share that was applied."""
        out = self.step(tf.nest.map_structure(lambda part: part[0], stacked))
        counts = tf.reduce_sum(out["counts"], axis=0) if self._way.counted else tf.zeros([0], tf.int64)
        applied = tf.cast(out["applied"], tf.float32)
        for number in tf.range(1, self._each):
            out = self.step(tf.nest.map_structure(lambda part, number=number: part[number], stacked))
            applied += tf.cast(out["applied"], tf.float32)
        return counts, applied / float(self._each)

    def _network(self) -> keras.Model:
        model = self._task.model(self._way.policy)
        if self._way.cast:
            scaler.formats.emulated("float8_e4m3fn", scaling=UNSCALED)(model)
        return scaler.formats.unit_scaled(model) if self._way.unit else model


@dataclasses.dataclass(frozen=True)
class _Text(TextTask):
    """The small transformer without positions: what follows a causal mask tells them apart."""

    def model(self, policy: str, attend: type[keras.layers.MultiHeadAttention] | None = None) -> keras.Model:
        layers = keras.layers
        inputs = keras.Input([self.context], dtype="int32")
        x = layers.Embedding(len(ALPHABET), self.width, dtype=policy)(inputs)
        for _ in range(self.blocks):
            normal = layers.LayerNormalization(dtype=policy)(x)
            heads = _HEADS, self.width // _HEADS
            attention = (attend or layers.MultiHeadAttention)(*heads, dtype=policy, flash_attention=False)
            x = layers.Add(dtype=policy)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=policy)(x)
            hidden = layers.Dense(4 * self.width, activation="gelu", dtype=policy)(normal)
            x = layers.Add(dtype=policy)([x, layers.Dense(self.width, dtype=policy)(hidden)])
        logits = layers.Dense(len(ALPHABET), dtype=policy)(layers.LayerNormalization(dtype=policy)(x))
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits), name=self.name)


def _medians(counts: np.ndarray) -> np.ndarray:
    """Log2 of the median of the non-zero magnitudes, as if they lay evenly within an octave, [seeds]."""
    lowest = scaler.observe.LOWEST
    found = []
    for row in counts[:, [scaler.observe.bin_of(exponent) for exponent in range(lowest, 128)]]:
        below = np.cumsum(row)
        at = int(np.argmax(2 * below >= below[-1]))
        found.append(lowest + at + float((below[-1] / 2 - (below[at] - row[at])) / max(row[at], 1)))
    return np.array(found)


def _power(exponents: np.ndarray) -> str:
    return with_range(*(f"2^{value:.1f}" for value in (exponents.mean(), exponents.min(), exponents.max())))
