"""Keras's `fit` with our `LossScaleOptimizer`, beside `fit` with Keras's own: same model, same batches, same settings.

    python benchmarks/fit.py [--json] [--quick]

A turn is a silent `fit` of one epoch, on batches that stay where they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import keras
import models
import paired
import tensorflow as tf

import loops.tasks
import scaler

OURS, PROTECTED, THEIRS = "halfstep", "halfstep with protect", "Keras LossScaleOptimizer"
SECONDS = 2.0


def digits_mlp(policy: str, batch_size: int) -> models.Problem:
    task = loops.tasks.load("digits")
    batch = tf.constant(task.images[:batch_size]), tf.constant(task.labels[:batch_size])
    return models.Problem(models.digits_mlp(policy), task.loss, batch)


MODELS = {
    "digits CNN": (functools.partial(models.digits_cnn, batch_size=32), 50),
    "digits MLP": (functools.partial(digits_mlp, batch_size=32), 200),
}
QUICK_MODELS = {"digits MLP": (functools.partial(digits_mlp, batch_size=2), 4)}
SETTINGS = {"fit": {"jit_compile": False}, "fit, jit": {"jit_compile": True}}
MANY = {"fit, 50 steps per execution": {"jit_compile": False, "steps_per_execution": 50}}
"""For the small models, which it is made for."""
TARGETS = {"fit": (1.00, 1.05), "fit, jit": (1.02, 1.05), "fit, 50 steps per execution": (1.05, 1.10)}
"""Without `protect` and with it."""


def contender(make: Callable[[str], models.Problem], side: str, steps: int, **arguments) -> Callable[[], object]:
    problem, inner = make("mixed_float16"), keras.optimizers.Adam(1e-4)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if side == THEIRS else scaler.LossScaleOptimizer(inner)
    # Not problem.loss: compile makes the labels of a function floating-point numbers.
    problem.model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **arguments)
    if side == PROTECTED:
        scaler.protect(problem.model)
    dataset = tf.data.Dataset.from_tensors(problem.batch).repeat()
    return lambda: problem.model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0)


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    settings = dict(list(SETTINGS.items())[:1]) if quick else SETTINGS
    chosen = list(itertools.product((QUICK_MODELS if quick else MODELS).items(), settings.items()))
    if not quick:
        chosen += itertools.product([("digits MLP", MODELS["digits MLP"])], MANY.items())
    for (name, (make, steps)), (setting, arguments) in chosen:
        contenders = {side: contender(make, side, steps, **arguments) for side in (OURS, PROTECTED, THEIRS)}
        taken = paired.take_turns(contenders, SECONDS, quick)
        title = f"{name}, mixed_float16, {setting}"
        found[title] = paired.case(taken, THEIRS, steps_in_a_turn=steps)
        for side, target in zip((OURS, PROTECTED), TARGETS[setting], strict=True):
            figures.append(paired.figure(f"{title}: {side} to Keras's", taken, side, THEIRS, target))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "fit", run)
