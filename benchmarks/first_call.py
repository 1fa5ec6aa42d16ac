"""What the first call of a step costs: tracing, TensorFlow's optimizer and compiling, in CPU seconds.

    python benchmarks/first_call.py [--json] [--quick]

Each contender makes its optimizer and its first call in a process of its own, which has imported everything and made
the model. Slots count, whoever makes them. The clock is one of CPU time: how many cores share the work makes no
difference.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import random
import time
from collections.abc import Callable

import keras
import models
import paired
import steps
import tensorflow as tf

import scaler

ROUNDS = 2
MODEL = functools.partial(models.transformer, layers=6)
QUICK_MODEL = functools.partial(models.transformer, layers=1, width=8, heads=1, length=4, words=5, batch_size=2)
SCALED = "Keras LossScaleOptimizer"


def by_hand(problem: models.Problem) -> Callable:
    """The step that a user writes with a `LossScaler`, with an optimizer that nobody built."""
    model, (x, y) = problem.model, problem.batch
    optimizer, loss_scaler = keras.optimizers.Adam(1e-4), scaler.LossScaler()

    def step():
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return step


CONTENDERS = {"halfstep": steps.halfstep, SCALED: steps.keras_scaled, "halfstep, by hand": by_hand}


def seconds(name: str, quick: bool) -> float:
    """CPU seconds until the end of one first call, in the process that it is called in."""
    problem = (QUICK_MODEL if quick else MODEL)("mixed_float16")
    before = time.process_time()
    tf.function(CONTENDERS[name](problem))().numpy()
    return time.process_time() - before


def run(quick: bool) -> paired.Report:
    taken: paired.Seconds = {name: [] for name in CONTENDERS}
    order, dice = list(CONTENDERS), random.Random(0)
    for _ in range(2 if quick else ROUNDS):
        dice.shuffle(order)
        for name in order:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                taken[name].append(pool.submit(seconds, name, quick).result())
    targets = {"halfstep": 1.0, "halfstep, by hand": None}
    figures = [paired.figure(f"{name}: to {SCALED}", taken, name, SCALED, target) for name, target in targets.items()]
    return paired.Report(figures, {"first call": paired.case(taken, SCALED)})


if __name__ == "__main__":
    paired.main(__doc__, "first_call", run)
