"""What dynamic scaling adds to a full train step, ours and Keras's, beside the same step without any scaler.

    python benchmarks/step.py [--json] [--quick]

Forward pass, backward pass and Adam, on one batch that stays where it is. A mode is compared with itself: the graph
with the graph, the step that XLA compiles as a whole with one that it compiles as a whole. No step overflows, so that
`retry` costs what it always costs.
"""

from __future__ import annotations

import functools
import itertools

import keras
import models
import paired
import steps
import tensorflow as tf

MODELS = {
    "transformer of 4 layers": models.transformer,
    "digits CNN": functools.partial(models.digits_cnn, batch_size=128),
}
QUICK_MODELS = {
    "transformer of 1 layer": functools.partial(
        models.transformer, layers=1, width=8, heads=1, length=4, words=5, batch_size=2
    )
}
CASES = [("mixed_float16", False), ("mixed_float16", True), ("float32", True)]
"""A policy, and whether XLA compiles the step as a whole: in float32 scaling is for comparison alone."""
TARGETS = {("transformer of 4 layers", True): 1.02, ("digits CNN", False): 1.04, ("digits CNN", True): 1.02}
"""By the model and whether XLA compiles the step as a whole."""
OTHERS = 1.03
RETRY = "halfstep, retry"
SECONDS = 2.5


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    chosen = QUICK_MODELS if quick else MODELS
    for (name, make), (policy, jit) in itertools.product(chosen.items(), CASES):
        written = steps.STEPS | ({} if policy == "float32" else {RETRY: functools.partial(steps.halfstep, retry=True)})
        contenders = {side: tf.function(step(make(policy)), jit_compile=jit or None) for side, step in written.items()}
        taken = paired.take_turns(contenders, SECONDS, quick)
        title = f"{name}, {policy}, {'jit' if jit else 'graph'}"
        found[title] = paired.case(taken, "no scaler")
        for side in ("halfstep", "Keras LossScaleOptimizer"):
            target = TARGETS.get((name, jit), OTHERS) if side == "halfstep" else None
            figures.append(paired.figure(f"{title}: {side}", taken, side, "no scaler", target))
        figures.append(
            paired.figure(f"{title}: halfstep to Keras's", taken, "halfstep", "Keras LossScaleOptimizer", 1.0)
        )
        if RETRY in taken:
            figures.append(paired.figure(f"{title}: with retry to without", taken, RETRY, "halfstep", 1.01))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "step", run)
