"""Where Headroom beats Dynamic and where it loses: skips, scale, gradients flushed to zero, final loss.

    python benchmarks/headroom.py [--steps 1500] [--seeds 3] [--json]
    python benchmarks/headroom.py --tune [--steps 1500]

Small networks on real digits, trained in mixed_float16 with each strategy, on losses of four kinds: as they are; of a
constant size of 2^-20; with a weight that jumps by 2^12 up and down every 300 steps; and with one batch in 100, at
random, whose loss is 2^10 times as large. The losses of a kind are the same for every strategy.

`--tune` replays recorded traces instead: one float32 run of each kind says at every step which amax a strategy would
have seen and from which scale on float16 would have overflowed, so that hundreds of choices of Headroom's numbers run
side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import NamedTuple

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import scaler
from loops.study.measured import HIGHEST, LOWEST
from loops.tasks import ImageTask, load

STRATEGIES = {
    "Dynamic()": scaler.Dynamic(),
    "Dynamic(growth_interval=200)": scaler.Dynamic(growth_interval=200),
    "Dynamic(2.0**40, growth_interval=200)": scaler.Dynamic(2.0**40, growth_interval=200),
    "Headroom()": scaler.Headroom(),
}
ZERO, OVERFLOW = 2.0**-25, 65520.0
"""What float16 rounds to zero, and what it rounds to infinity."""


def factors(kind: str, steps: int) -> np.ndarray:
    """What the loss is multiplied by at each step, float32."""
    step, rare = np.arange(steps), np.random.default_rng(0).random(steps) < 0.01
    exponents = {
        "plain": np.zeros(steps),
        "small": np.full(steps, -20),
        "jumps": np.where(step // 300 % 2, -12, 0),
        "spikes": np.where(rare, 10, 0),
    }
    return np.float32(2.0) ** np.float32(exponents[kind])


KINDS = ("plain", "small", "jumps", "spikes")


class Gradients(NamedTuple):
    """What a float32 model shows of one step's gradients, without a scale.

    Attributes:
        amax: Float32, the largest gradient of a weight.
        largest: Float32, the largest gradient of a weight or an activation.
        histogram: Int64, the gradients of activations that are not zero, by floor(log2) from LOWEST to HIGHEST.
    """

    amax: tf.Tensor
    largest: tf.Tensor
    histogram: tf.Tensor


def gradients_of(task: ImageTask, model: keras.Model, images, labels, factor):
    """The loss, the gradients by weights, and `Gradients`."""
    weights = model.trainable_variables
    with tf.GradientTape() as tape:
        hidden, activations = images, []
        for layer in model.layers:
            hidden = layer(hidden, training=True)
            activations.append(hidden)
        loss = task.loss(labels, hidden)
        multiplied = loss * factor
    by_weight, by_activation = tape.gradient(multiplied, (weights, activations))
    values = tf.concat([tf.reshape(grad, [-1]) for grad in by_activation], axis=0)
    bits = tf.bitwise.bitwise_and(tf.bitcast(tf.boolean_mask(values, values != 0), tf.int32), 0x7FFFFFFF)
    exponents = tf.clip_by_value(tf.bitwise.right_shift(bits, 23) - 127, LOWEST, HIGHEST) - LOWEST
    counts = tf.math.bincount(exponents, minlength=HIGHEST - LOWEST + 1, dtype=tf.int64)
    seen = Gradients(scaler.gradients.amax(by_weight), scaler.gradients.amax([*by_weight, values]), counts)
    return loss, by_weight, seen


def flushed(histogram: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """How many of the counted gradients float16 makes zero at the scale 2^exponent."""
    below = np.concatenate([[0], np.cumsum(histogram)])
    return below[np.clip(-25 - np.int64(np.floor(exponent)) - LOWEST, 0, len(histogram))]


def record(task: ImageTask, kind: str, steps: int, seed: int = 0) -> list[Gradients]:
    """The trace of a float32 run, in which nothing overflows."""
    keras.utils.set_random_seed(seed)
    model, optimizer = task.model("float32"), keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images, labels, factor):
        _, grads, seen = gradients_of(task, model, images, labels, factor)
        optimizer.apply([grad / factor for grad in grads], model.trainable_variables)
        return seen

    batches = task.dataset(64, seed).as_numpy_iterator()
    found = [step(*next(batches), factor) for factor in factors(kind, steps)]
    return [Gradients(*(np.asarray(value) for value in seen)) for seen in found]


def replay(strategy: scaler.Strategy, trace: list[Gradients], words: int = 1) -> dict[str, np.ndarray]:
    """What each of `words` strategies, side by side, would have done on a trace.

    Returns:
        `skipped` (steps), `log2_scale` (mean), `flushed` (share of gradients at the scales of the steps applied).
    """
    state = strategy.init()
    state = type(state)(*(value if value.shape.rank else tf.fill([words], value) for value in state))
    update = tf.function(strategy.update)
    skipped, logs, lost, all_of_them = np.zeros(words), np.zeros(words), np.zeros(words), 0
    for seen in trace:
        logarithm = np.log2(state.loss_scale.numpy())
        finite = state.loss_scale.numpy() * seen.largest < OVERFLOW
        lost += flushed(seen.histogram, logarithm)
        all_of_them += seen.histogram.sum()
        skipped += ~finite
        logs += logarithm
        amax = np.where(finite, seen.amax, np.inf).astype(np.float32)
        state = update(state, scaler.Event(tf.constant(finite), amax=tf.constant(amax)))
    return {"skipped": skipped, "log2_scale": logs / len(trace), "flushed": lost / all_of_them}


def train(task: ImageTask, kind: str, strategy: scaler.Strategy, steps: int, seed: int) -> dict[str, float]:
    """A mixed_float16 run. The final loss is the mean over the last 100 steps, without the factor."""
    keras.utils.set_random_seed(seed)
    model, optimizer, loss_scaler = (
        task.model("mixed_float16"),
        keras.optimizers.Adam(1e-2),
        scaler.LossScaler(strategy),
    )
    twin = task.model("float32")
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function
    def step(images, labels, factor):
        before = [tf.identity(variable) for variable in model.non_trainable_variables]
        with tf.GradientTape() as tape:
            loss = task.loss(labels, model(images, training=True))
            scaled = loss_scaler.scale(loss * factor)
        used = loss_scaler.loss_scale
        grads = loss_scaler.unscale(tape.gradient(scaled, weights))
        finite = scaler.all_finite(grads)

        def apply():
            optimizer.apply([grad / factor for grad in grads], weights)
            return True

        def skip():
            for variable, value in zip(model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            return True

        tf.cond(finite, apply, skip)
        loss_scaler.update(scaler.Event(finite, amax=scaler.gradients.amax(grads)))
        return loss, used

    @tf.function
    def look(images, labels, factor):
        for own, variable in zip(twin.variables, model.variables, strict=True):
            own.assign(tf.cast(variable, own.dtype))
        return gradients_of(task, twin, images, labels, factor)[2].histogram

    batches = task.dataset(64, seed).as_numpy_iterator()
    losses, logs, lost, all_of_them = [], [], 0, 0
    for number, factor in enumerate(factors(kind, steps)):
        batch = next(batches)
        histogram = look(*batch, factor).numpy() if number % 10 == 0 else None
        loss, used = step(*batch, factor)
        losses.append(float(loss))
        logs.append(np.log2(float(used)))
        if histogram is not None:
            lost += int(flushed(histogram, logs[-1]))
            all_of_them += int(histogram.sum())
    return {
        "skipped": int(loss_scaler.counters.skipped),
        "log2_scale": float(np.mean(logs)),
        "flushed": lost / all_of_them,
        "final_loss": float(np.mean(losses[-100:])),
    }


def tune(task: ImageTask, steps: int) -> list[dict]:
    """Headroom's numbers on recorded traces, and the other strategies beside them."""
    grid = list(itertools.product((1, 2, 3, 4, 6), (10, 30, 100, 300, 1000), (100, 300, 1000, 3000)))
    names = ("headroom", "memory", "relax_interval")
    numbers = {name: tf.constant(values) for name, values in zip(names, zip(*grid, strict=True), strict=True)}
    rows = [{"strategy": "Headroom", **dict(zip(names, choice, strict=True))} for choice in grid]
    rows += [{"strategy": name} for name in STRATEGIES if name != "Headroom()"]
    for kind in KINDS:
        trace = record(task, kind, steps)
        side_by_side = replay(scaler.Headroom(**numbers), trace, len(grid))
        alone = [replay(strategy, trace) for name, strategy in STRATEGIES.items() if name != "Headroom()"]
        for field in side_by_side:
            values = [*side_by_side[field], *(own[field][0] for own in alone)]
            for row, value in zip(rows, values, strict=True):
                row[f"{kind} {field}"] = float(value)
    return rows


def compare(task: ImageTask, steps: int, seeds: int) -> list[dict]:
    """Each strategy on each kind of loss, means over the seeds."""
    rows = []
    for kind, (name, strategy) in itertools.product(KINDS, STRATEGIES.items()):
        runs = [train(task, kind, strategy, steps, seed) for seed in range(seeds)]
        rows.append({"loss": kind, "strategy": name, **{f: float(np.mean([run[f] for run in runs])) for f in runs[0]}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    task = load("digits")
    rows = tune(task, options.steps) if options.tune else compare(task, options.steps, options.seeds)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = rich.table.Table()
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        values = [row.get(heading, "") for heading in rows[0]]
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    rich.console.Console(width=200).print(table)


if __name__ == "__main__":
    main()
