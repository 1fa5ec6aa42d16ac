"""One of two workers of a `MultiWorkerMirroredStrategy`, which `test_two_workers.py` imports with TF_CONFIG set.

Each worker overflows in turn. What this worker saw goes to the report.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Must come first.

import replica_cases as cases  # noqa: E402
import written_step  # noqa: E402

SEQUENCE = ((0, None), (1, 0), (2, None), (3, 1), (4, None), (5, 0), (6, 1))
"""Number of each batch, and the worker whose share of it is spoiled."""


def batches(where):
    """The same global batches for both workers; each takes its share."""
    for number, worker in SEQUENCE:
        one = cases.batch(number)
        yield one if worker is None else cases.spoil(one, where, worker, 2)


def values(variables):
    return [part.astype(np.float64).tolist() for parts in cases.components(variables) for part in parts]


def written(in_graph):
    """A hand-written step on float16 variables with masters and BatchNorm: gradients, then forward passes overflow."""
    step = written_step.Written(strategy)
    step.run([cases.batch(9)], in_graph)
    applied, unmoved = [], []
    for where in ("gradients", "forward"):
        for one in batches(where):
            before = cases.raw(step.moved())
            applied += step.run([one], in_graph)
            unmoved.append(cases.raw(step.moved()) == before)
    return {
        "applied": applied,
        "unmoved": unmoved,
        "finite": cases.finite(step.moved()),
        "loss_scale": float(step.loss_scaler.loss_scale),
        "counters": [int(count) for count in step.loss_scaler.counters],
        "cause": int(step.loss_scaler.last_skip.cause),
        "weights": values(step.agreed()),
        "statistics": values(step.model.non_trainable_variables),
    }


def looped(**arguments):
    """A `TrainStep` in an in-graph `Loop`."""
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    rig = cases.Rig(strategy, cases.plain_model, adam, steps_per_call=7, clip_norm=0.5, **arguments)
    outputs = rig.run(list(batches("gradients")))
    return {
        "applied": outputs["applied"].tolist(),
        "finite": cases.finite(rig.variables()),
        "loss_scale": float(rig.loss_scaler.loss_scale),
        "counters": [int(count) for count in rig.loss_scaler.counters],
        "weights": values(rig.weights()),
    }


REPORTS = {
    "written": functools.partial(written, in_graph=False),
    "written in tf.range": functools.partial(written, in_graph=True),
    "Loop": looped,
    "Loop with accumulation": functools.partial(looped, accumulate=7),
}
"""What this worker saw, by part, for JSON."""
