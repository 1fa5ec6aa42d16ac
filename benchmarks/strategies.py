"""What a strategy costs: its update and its statistics, as shares of a training step.

    python benchmarks/strategies.py [--rounds 30] [--json]

A step is the forward pass, the backward pass and Adam of a small convolutional network on 64 digits, as a graph. An
update is timed as a hundred of them in one `tf.range` loop. A statistic is timed as a graph of its own on the network's
gradients, so that calling it counts; "all_finite and amax" beside "all_finite" says what amax adds. All take turns, and
a figure is the median over the rounds of the time divided by that of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import keras
import rich.table
import tensorflow as tf
from rich.console import Console

import scaler
from loops.tasks import load

UPDATES = 100
STRATEGIES = {
    "Static": scaler.Static(1024.0),
    "Dynamic": scaler.Dynamic(),
    "Smooth": scaler.Smooth(),
    "LogNormal": scaler.LogNormal(),
    "Histogram": scaler.Histogram(),
    "DelayedAmax": scaler.DelayedAmax(),
    "Headroom": scaler.Headroom(),
}


def updates(strategy: scaler.Strategy):
    """A function that runs UPDATES updates."""
    state = strategy.init()
    variables = [tf.Variable(value) for value in state]
    event = scaler.Event(tf.constant(True), tf.constant(0.5), tf.constant([10**6, 3], tf.int64))

    @tf.function
    def run():
        now = type(state)(*(tf.identity(variable) for variable in variables))
        for _ in tf.range(UPDATES):
            now = strategy.update(now, event)
        for variable, value in zip(variables, now, strict=True):
            variable.assign(value)

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    task = load("digits")
    model, optimizer = task.model("mixed_float16"), keras.optimizers.Adam()
    images, labels = next(iter(task.dataset(64, 0)))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = task.loss(labels, model(images, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return grads

    grads = step()
    contenders = {"step": (step, 1), **{f"{n}.update": (updates(s), UPDATES) for n, s in STRATEGIES.items()}}
    measured = {
        "all_finite": scaler.all_finite,
        "amax": scaler.gradients.amax,
        "all_finite and amax": lambda values: (scaler.all_finite(values), scaler.gradients.amax(values)),
        "histogram, one edge": lambda values: scaler.gradients.histogram(values, (8188.0,)),
    }
    for name, function in measured.items():
        compiled = tf.function(function)
        contenders[name] = (lambda compiled=compiled: compiled(grads), 1)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 3):
        for name, (run, times) in contenders.items():
            start = time.perf_counter()
            run()
            if number >= 3:
                seconds[name].append((time.perf_counter() - start) / times)
    shares = {
        name: statistics.median(own / whole for own, whole in zip(values, seconds["step"], strict=True))
        for name, values in seconds.items()
    }
    if options.json:
        print(json.dumps(shares, indent=2))
        return
    table = rich.table.Table("", "share of a step")
    for name, share in shares.items():
        table.add_row(name, f"{share:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
