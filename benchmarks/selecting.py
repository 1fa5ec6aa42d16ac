"""What a step costs that selects its new values, beside one that branches: `LossScaler(select=True)` and False.

    python benchmarks/selecting.py [--json] [--quick]

On a CPU. A branch costs little there, since the host decides anyway; on a GPU it waits for the device.
"""

from __future__ import annotations

import functools
import itertools

import gate
import keras
import models
import paired
import step
import steps
import tensorflow as tf

import loops
import scaler

SECONDS = 2.5
CASES = [("Adam", "float32", None), ("SGD momentum", "float16", 1.0)]
WAYS = {"selecting": True, "branching": False}


def digits_mlp(policy: str) -> models.Problem:
    """The small model for which a step is mostly what surrounds it."""
    return models.Problem(
        models.digits_mlp(policy), models.cross_entropy, (tf.random.normal([64, 8, 8, 1]), tf.zeros([64], tf.int32))
    )


def train_step(problem: models.Problem, select: bool):
    taken = loops.TrainStep(
        problem.model, problem.loss, keras.optimizers.Adam(1e-4), loss_scaler=scaler.LossScaler(select=select)
    )
    return lambda: taken(problem.batch)["loss"]


def run(quick: bool) -> paired.Report:
    figures, found = [], {}

    def measured(title: str, contenders: dict) -> None:
        taken = paired.take_turns(contenders, SECONDS, quick)
        reference = next(name for name in contenders if name not in WAYS)
        found[title] = paired.case(taken, reference)
        figures.append(paired.figure(f"{title}: selecting to branching", taken, "selecting", "branching"))
        figures.extend(paired.figure(f"{title}: {way} to {reference}", taken, way, reference) for way in WAYS)
        keras.backend.clear_session()

    problems = step.QUICK_MODELS if quick else {"digits MLP": digits_mlp, **step.MODELS}
    for (name, make), jit in itertools.product(problems.items(), (False, True)):
        compiled = functools.partial(tf.function, jit_compile=jit or None)
        ways = {way: compiled(train_step(make("mixed_float16"), select)) for way, select in WAYS.items()}
        plain = {"no scaler": compiled(steps.plain(make("mixed_float16")))}
        measured(f"{name}, mixed_float16, {'jit' if jit else 'graph'}", {**ways, **plain})
    for (name, shapes), (optimizer, dtype, clip) in itertools.product(
        (gate.QUICK_SIZES if quick else gate.SIZES).items(), CASES
    ):
        values, weights = gate.arrays(shapes)
        grads, make = [tf.constant(value, dtype) for value in values], gate.OPTIMIZERS[optimizer]
        ways = {way: gate.ours(grads, weights, make, clip, False, select) for way, select in WAYS.items()}
        theirs = {"Keras LossScaleOptimizer": gate.keras_scaled(grads, weights, make, clip, False)}
        measured(f"{name}, {optimizer}, {dtype}", {**ways, **theirs})
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "selecting", run)
