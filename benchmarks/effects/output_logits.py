"""Output logits that drift away at high learning rates, with and without z-loss.

It takes many steps, so the transformers have no layers, and many are trained at once: each predicts the next character
from one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from benchmarks.effects import networks
from benchmarks.effects.adam_copies import CLIPPED, Setup, at_rest, stepped
from benchmarks.effects.effect import Found, Line, curve, curves, flat, spread
from benchmarks.effects.small_transformer import WARM, sensitivity, share_of_rate, text
from loops.tasks.text import ALPHABET

WIDTH, BATCH = 16, 32
_EVERY = 50
"""The steps between two records."""
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
_NONE, _Z_LOSS, _DECAY = WAYS = ("neither", "z-loss", "weight decay")
_COEFFICIENT, _WEIGHT_DECAY = 1e-4, 1e-4
_BETA_2 = 0.95
_PUBLISHED_RATE = 0.1
_NEAR = 1.0
"""What counts as close to 0, and by how much two courses of log Z differ that have parted."""
_POINTS = 40
"""The points of a curve over steps."""


class Runs(NamedTuple):
    """What some networks did.

    Attributes:
        log_z: Float32 [records, setups, seeds], the mean over a batch of log Z, Z the sum of the logits' exponentials.
        logit: The mean output logit, likewise.
        first: [setups, seeds], the held-out loss before the first step, nats per character.
        end: The same at the end.
        rounded: The same at the end, if output logits are rounded to bfloat16.
    """

    log_z: np.ndarray
    logit: np.ndarray
    first: np.ndarray
    end: np.ndarray
    rounded: np.ndarray


def run(seeds: int, steps: int) -> Found:
    """Trains transformers of no layers at four learning rates: with z-loss, with weight decay, and with neither.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    settings = {_NONE: (0.0, 0.0), _Z_LOSS: (_COEFFICIENT, 0.0), _DECAY: (0.0, _WEIGHT_DECAY)}
    setups = [Setup(rate, _BETA_2, way=CLIPPED, decay=settings[way][1] / rate) for way in WAYS for rate in RATES]
    coefficients = [settings[way][0] for way in WAYS for _ in RATES]
    return found_of(train(setups, coefficients, seeds=seeds, steps=steps), steps)


def found_of(runs: Runs, steps: int) -> Found:
    """What its runs show: for each of `WAYS` each of `RATES`.

    Args:
        runs: The runs.
        steps: The steps of each run.
    """
    own = {way: slice(number * len(RATES), (number + 1) * len(RATES)) for number, way in enumerate(WAYS)}
    late = slice(-max(1, len(runs.log_z) // 10), None)
    log_z, logit = (
        {way: values[late, part].mean(axis=0) for way, part in own.items()} for values in (runs.log_z, runs.logit)
    )
    probability = np.array([(logit[way] - log_z[way]).mean(axis=1) for way in WAYS])
    ends = {way: runs.end[part] for way, part in own.items()}
    cost = {way: runs.rounded[part] - ends[way] for way, part in own.items()}
    sensitive = {way: sensitivity(ends[way], runs.first[part][0]) for way, part in own.items()}
    at = RATES.index(_PUBLISHED_RATE)
    plain, held, decayed = log_z.values()
    at_rate = {way: runs.log_z[:, part][:, at] for way, part in own.items()}
    nearer = (np.abs(decayed) < np.abs(plain)).sum(axis=1)
    parted, half = _apart(at_rate[_NONE], at_rate[_Z_LOSS], steps)
    rise, rise_z, _ = (values[-1].mean() - values[0].mean() for values in ends.values())
    return Found(
        words={
            "warm": WARM,
            "first_log_z": runs.log_z[0].mean(),
            "least_probability": probability.min(),
            "most_probability": probability.max(),
            "mean_plain": plain[at].mean(),
            "mean_held": held[at].mean(),
            "plain": plain[at],
            "held": held[at],
            "logit": logit[_NONE][at],
            "parted": _steps(parted),
            "half": _steps(half),
            "sensitive": sensitive,
            "rise": rise,
            "rise_z": rise_z,
            "cost": max(values.mean(axis=1).max() for values in cost.values()),
            "nearer": ", ".join(
                f"in {nearer[row]} of {plain.shape[1]} seeds at {RATES[row]:g}" for row in range(at, len(RATES))
            ),
        },
        rows=(
            (f"{rate:g}", way, log_z[way][row], ends[way][row], cost[way][row])
            for row, rate in enumerate(RATES)
            for way in WAYS
        ),
        holds={
            "down": np.diff(plain.mean(axis=1)) < 0,
            "below": plain[at] < 0,
            "late": _late(parted, half, steps) if (plain[at] < 0).all() else None,
            "aim": np.abs(held[at]) <= _NEAR,
            "nearer": np.abs(held[at:]) < np.abs(plain[at:]),
            "decay": np.abs(decayed[at:]).mean(axis=1) < np.abs(plain[at:]).mean(axis=1),
            "sensitive": sensitive[_Z_LOSS] < sensitive[_NONE],
        },
        lines=[
            curves(RATES, log_z),
            [_course(way, values, steps) for way, values in at_rate.items()],
            curves(RATES, ends),
        ],
        measured=flat(
            {"log Z": log_z, "logit": logit, "loss": ends, "cost in bfloat16": cost}, [f"{rate:g}" for rate in RATES]
        )
        | flat(
            {
                "sensitivity": sensitive,
                f"step at which log Z has parted from that with z-loss at {_PUBLISHED_RATE}": parted,
                f"step at which it has half of its distance at {_PUBLISHED_RATE}": half,
            }
        ),
    )


def _apart(plain: np.ndarray, held: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps from which log Z is more than `_NEAR`, and half of the distance in the end, below that with z-loss.

    Args:
        plain: log Z of each record without z-loss, [records, seeds].
        held: The same with it.
        steps: The steps of each run.

    Returns:
        Both for good, [seeds] each; NaN if they are not apart in the end.
    """
    distance = _smoothed(held) - _smoothed(plain)
    last = distance[-max(1, len(distance) // 10) :].mean(axis=0)
    found = []
    for least in (_NEAR, last / 2):
        below = len(distance) - (distance[::-1] <= least).argmax(axis=0)
        first = np.where((distance > least).all(axis=0), 0, below)
        found.append(np.where(last > _NEAR, (first + 0.5) * steps / len(distance), np.nan))
    return found[0], found[1]


def _late(parted: np.ndarray, half: np.ndarray, steps: int) -> bool | None:
    """Whether both lie in the second half of the run, in each seed; None if only one does, or nothing parts."""
    late = [bool((values > steps / 2).all()) for values in (parted, half)]
    if not np.isfinite(parted).all():
        return None
    return late[0] if late[0] == late[1] else None


def _steps(known: np.ndarray) -> str:
    known = known[np.isfinite(known)]
    return f"step {spread(known, '.0f')}" if len(known) else "in none"


def _smoothed(by_record: np.ndarray) -> np.ndarray:
    """Records [records, seeds], each a mean with its neighbours, so that curves can be told apart, [points, seeds]."""
    parts = np.array_split(np.asarray(by_record), min(_POINTS, len(by_record)))
    return np.array([part.mean(axis=0) for part in parts])


def _course(label: str, by_record: np.ndarray, steps: int) -> Line:
    means = _smoothed(by_record)
    return curve(label, (np.arange(len(means)) + 0.5) * steps / len(means), means)


def train(
    setups: Sequence[Setup],
    coefficients: Sequence[float],
    *,
    seeds: int,
    steps: int,
    held_out: np.ndarray | None = None,
) -> Runs:
    """Trains an embedding, a LayerNorm and a head without biases for each set-up and seed.

    Args:
        setups: The optimizers; the learning rate rises and falls as `share_of_rate` says.
        coefficients: What log^2 Z is multiplied by in the loss of each set-up.
        seeds: The number of networks for each; all set-ups of a seed see the same batches.
        steps: The steps of each run.
        held_out: What `pairs_of` returns for the characters of the held-out losses; None takes all of the text.
    """
    task, count = text(), len(setups)
    each = Setup(*(np.repeat(values, seeds) for values in zip(*setups, strict=True)))
    z = tf.constant(np.repeat(coefficients, seeds), tf.float32)
    characters = tf.constant(task.characters)
    if held_out is None:
        held_out = pairs_of(task.test_characters[:-1], task.test_characters[1:])

    def start() -> tuple:
        weights = _start(seeds, count)
        return weights, at_rest(weights)

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, moments = state
        starts = tf.random.stateless_uniform([seeds, BATCH], tf.stack([step, 1]), 0, characters.shape[0] - 1, tf.int32)
        given, following = (
            tf.tile(tf.one_hot(tf.gather(characters, places), len(ALPHABET)), [count, 1, 1])
            for places in (starts, starts + 1)
        )
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits = logits_of(weights, given)
            log_z = tf.reduce_logsumexp(logits, axis=-1)
            wrong = tf.reduce_mean(log_z - tf.reduce_sum(logits * following, axis=-1), axis=1)
            loss = tf.reduce_sum(wrong + z * tf.reduce_mean(tf.square(log_z), axis=1))
        grads = tape.gradient(loss, weights)
        number, share = tf.cast(step, tf.float32) + 1, share_of_rate(step, steps)
        weights, moments, _, _ = stepped(weights, moments, grads, number, each, share)
        return (weights, moments), tf.stack([tf.reduce_mean(log_z, axis=1), tf.reduce_mean(logits, axis=[1, 2])])

    (weights, _), rows = networks.over_steps(steps, start, take)
    every = min(_EVERY, steps)
    log_z, logit = np.moveaxis(rows[every - 1 :: every].reshape(-1, 2, count, seeds), 1, 0)
    first, end, rounded = (
        values.numpy().reshape(count, seeds)
        for values in (_held_out(_start(seeds, count), held_out)[0], *_held_out(weights, held_out))
    )
    return Runs(log_z, logit, first, end, rounded)


def logits_of(weights: Sequence[tf.Tensor], given: tf.Tensor) -> tf.Tensor:
    """Output logits [copies, examples, characters] after characters in one-hot form, of the same shape."""
    embedding, gain, head = weights
    x = given @ embedding
    centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True) + 1e-6)
    return (centred / deviation * gain) @ head


def _start(seeds: int, count: int) -> list[tf.Tensor]:
    """Embedding, gain and head; plain normal with a deviation of 1 / sqrt(width)."""
    size, deviation = len(ALPHABET), 1 / np.sqrt(WIDTH)
    drawn = [np.random.default_rng(seed).normal(0, deviation, (2, size, WIDTH)) for seed in range(seeds)]
    embedding, head = np.tile(np.stack(drawn, axis=1), [1, count, 1, 1]).astype(np.float32)
    gain = tf.ones([count * seeds, 1, WIDTH])
    return [tf.constant(embedding), gain, tf.constant(np.swapaxes(head, 1, 2))]


def pairs_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How often each character follows each, as a share of all, float32 [before, after]."""
    counts = np.zeros([len(ALPHABET)] * 2)
    np.add.at(counts, (before, after), 1)
    return (counts / counts.sum()).astype(np.float32)


@tf.function(reduce_retracing=True)
def _held_out(weights: Sequence[tf.Tensor], pairs: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    """The exact loss over the held-out text, as it is and with logits in bfloat16, [copies] each."""
    copies, size = weights[0].shape[0], len(ALPHABET)
    logits = logits_of(weights, tf.eye(size, batch_shape=[copies]))
    narrow = tf.cast(tf.cast(logits, tf.bfloat16), tf.float32)
    plain, rounded = (-tf.reduce_sum(pairs * tf.nn.log_softmax(each), axis=[1, 2]) for each in (logits, narrow))
    return plain, rounded
