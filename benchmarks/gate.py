"""What the gate costs: from scaled gradients to updated weights, ours against Keras's, as ratios within one run.

    python benchmarks/gate.py [--rounds 15] [--json]

Every contender gets the same gradients and its own copy of the same variables. They take turns, one call each a round,
after a warm-up; the figure is the median over the rounds of a contender's time divided by the reference's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import keras
import numpy as np
import rich.box
import rich.console
import rich.table
import tensorflow as tf

import scaler

SIZES = {"200 x (32, 32)": (200, 32), "50 x (256, 256)": (50, 256), "4 x (2048, 2048)": (4, 2048)}
REFERENCE = "Keras LossScaleOptimizer, best of plain and jit"


def variables(count: int, size: int, dtype: str) -> list[tf.Variable]:
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.normal(size=(size, size)), dtype=dtype) for _ in range(count)]


def ours(count, size, dtype, make_optimizer, clip, jit):
    optimizer, loss_scaler = make_optimizer(), scaler.LossScaler()
    own = variables(count, size, dtype)
    targets = scaler.MasterWeights(own) if dtype == "float16" else own
    return tf.function(lambda grads: loss_scaler.apply(optimizer, grads, targets, clip_norm=clip), jit_compile=jit)


def keras_scaled(count, size, dtype, make_optimizer, clip, jit):
    optimizer = keras.optimizers.LossScaleOptimizer(make_optimizer(global_clipnorm=clip))
    own = variables(count, size, "float32")
    optimizer.build(own)
    return tf.function(lambda grads: optimizer.apply([tf.cast(g, tf.float32) for g in grads], own), jit_compile=jit)


def keras_plain(count, size, dtype, make_optimizer, clip, jit):
    optimizer = make_optimizer(global_clipnorm=clip)
    own = variables(count, size, "float32")
    optimizer.build(own)
    return tf.function(lambda grads: optimizer.apply([tf.cast(g, tf.float32) for g in grads], own), jit_compile=jit)


CONTENDERS = {
    "halfstep": (ours, None),
    "halfstep, jit": (ours, True),
    "Keras LossScaleOptimizer": (keras_scaled, None),
    "Keras LossScaleOptimizer, jit": (keras_scaled, True),
    "Keras without scaling": (keras_plain, None),
    "Keras without scaling, jit": (keras_plain, True),
}


def measure(count: int, size: int, dtype: str, make_optimizer, clip, rounds: int) -> dict[str, list[float]]:
    grads = [tf.constant(np.random.default_rng(1).normal(size=(size, size)), dtype) for _ in range(count)]
    steps = {name: make(count, size, dtype, make_optimizer, clip, jit) for name, (make, jit) in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step(grads)
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over the rounds of each contender's time by that of Keras's scaler at its best."""
    best = min(
        ("Keras LossScaleOptimizer", "Keras LossScaleOptimizer, jit"), key=lambda n: statistics.median(seconds[n])
    )
    return {
        name: statistics.median(own / other for own, other in zip(times, seconds[best], strict=True))
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    optimizers = {
        "Adam": lambda **arguments: keras.optimizers.Adam(1e-3, **arguments),
        "SGD momentum": lambda **arguments: keras.optimizers.SGD(1e-3, momentum=0.9, **arguments),
    }
    found = []
    for size_name, (count, size) in SIZES.items():
        for optimizer, make in optimizers.items():
            for dtype, clip in (("float32", None), ("float32", 1.0), ("float16", None)):
                seconds = measure(count, size, dtype, make, clip, options.rounds)
                row = {"sizes": size_name, "optimizer": optimizer, "gradients": dtype, "clip": clip}
                found.append({**row, "ratios": ratios(seconds)})
                print(row, {name: round(value, 2) for name, value in found[-1]["ratios"].items()}, file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = rich.table.Table(box=rich.box.SIMPLE, caption=f"median ratio to {REFERENCE}")
    for heading in ("sizes", "optimizer", "gradients", *CONTENDERS):
        table.add_column(heading)
    for row in found:
        name = row["gradients"] + (", clipped" if row["clip"] else "")
        table.add_row(row["sizes"], row["optimizer"], name, *(f"{value:.2f}" for value in row["ratios"].values()))
    rich.console.Console(width=160).print(table)


if __name__ == "__main__":
    main()
