"""Steps per second of `loops.Loop` beside Keras's `fit`, on the digits.

    python benchmarks/loop.py [--json] [--quick]

The same model, loss, optimizer and batches. A turn is a call of `run` or of `fit` that takes a few hundred steps. `fit`
is silent: drawing a progress bar is not training.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import models
import paired

import loops
import loops.tasks
import scaler

BATCH_SIZE = 32
STEPS = 150
SECONDS = 5.0
DEFAULTS = "fit"
MODELS = {
    "digits MLP, float32": (models.digits_mlp, "float32", 3.0),
    "digits MLP, mixed_float16": (models.digits_mlp, "mixed_float16", 3.0),
}
TO_BEST = 1.0
TO_OWN_BEST = 0.95
CHOOSES = "Loop"
EACH_STEP = "Loop, a visit at each step"


def loop(make_model, policy, dataset, steps: int, **arguments) -> Callable[[], None]:
    scaled = policy == "mixed_float16"
    step = loops.TrainStep(
        make_model(policy),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.Adam(1e-3),
        loss_scaler=scaler.LossScaler(scaler.Dynamic() if scaled else scaler.NoScaling()),
    )
    made = loops.Loop(step, dataset, **arguments)
    return lambda: made.run(made.counters.data + steps)


def fit(make_model, policy, dataset, steps: int, **arguments) -> Callable[[], None]:
    model, optimizer = make_model(policy), keras.optimizers.Adam(1e-3)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **arguments)
    return lambda: model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0)


def contenders(steps: int) -> dict[str, tuple]:
    many = steps // 3
    return {
        CHOOSES: (loop, {}),
        EACH_STEP: (loop, {"steps_per_call": 1}),
        f"Loop, {many} steps per call": (loop, {"steps_per_call": many}),
        f"Loop, {many} steps per call, jit": (loop, {"steps_per_call": many, "jit_compile": True}),
        DEFAULTS: (fit, {}),
        "fit, no jit": (fit, {"jit_compile": False}),
        f"fit, {many} steps per execution": (fit, {"steps_per_execution": many}),
        f"fit, {many} steps per execution, no jit": (fit, {"steps_per_execution": many, "jit_compile": False}),
    }


def run(quick: bool) -> paired.Report:
    steps = 6 if quick else STEPS
    figures, found = [], {}
    task = loops.tasks.load("digits")
    for title, (make_model, policy, target) in list(MODELS.items())[: 1 if quick else None]:
        chosen = contenders(steps)
        taken = paired.take_turns(
            {
                name: make(make_model, policy, task.dataset(BATCH_SIZE, seed=0), steps, **arguments)
                for name, (make, arguments) in chosen.items()
            },
            SECONDS,
            quick,
        )
        ours = paired.best(taken, [name for name in chosen if name.startswith("Loop")])
        fixed = paired.best(taken, [name for name in chosen if name.startswith("Loop, ") and "jit" not in name])
        theirs = paired.best(taken, [name for name in chosen if name.startswith("fit")])
        speeds = {name: steps / paired.statistics.median(seconds) for name, seconds in taken.items()}
        found[title] = paired.case(taken, DEFAULTS, steps_per_second=speeds)
        pairs = (
            (CHOOSES, DEFAULTS, target),
            (CHOOSES, fixed, TO_OWN_BEST),
            (EACH_STEP, DEFAULTS, 1.0),
            (ours, theirs, TO_BEST),
        )
        for own, reference, wanted in pairs:
            faster, quartiles = paired.ratio(taken, reference, own)
            name = f"{title}: {own}, times as fast as {reference}"
            figures.append(paired.Figure(name, faster, quartiles, wanted, at_least=True))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "loop", run)
