"""Runs in a folder, to be rewound: a small float16 model with all kinds of state, and a step that costs nothing."""

import hashlib

import keras
import numpy as np
import tensorflow as tf
from models import squared_error, stateful_model
from resume_cases import batches

import loops
import scaler

BAD = 4
"""The batch that overflows."""


def stateful(run, *, steps_per_call=4, accumulate=1):
    """Float16 with masters, BatchNorm, dropout, clipping, shuffling beyond an epoch, and a scale that moves."""
    keras.utils.set_random_seed(5)
    step = loops.TrainStep(
        stateful_model("float16"),
        squared_error,
        keras.optimizers.SGD(1e-2, momentum=0.9),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**8, growth_interval=3)),
        accumulate=accumulate,
    )
    saves = loops.Checkpoint(run / "ckpt", every=4, run={"accumulate": accumulate})
    actions = [loops.JsonLines(run / "steps.jsonl"), saves]
    # XLA could not compile it, as it draws random numbers: the loop need not trace it to find out.
    return loops.Loop(step, batches(BAD), steps_per_call=steps_per_call, actions=actions, jit_compile=False)


def numbers():
    return tf.data.Dataset.range(1, 41).shuffle(20, seed=1)


def counting(run, dataset=None, *, every=4, name="counting", log=True, saves=True, actions=(), **arguments):
    """A step whose weight is the decayed sum of the numbers it was given."""
    total = tf.Variable(0.0)

    def step(number):
        total.assign(total * 0.9 + tf.cast(number, tf.float32))
        return {"loss": tf.identity(total)}

    found = [loops.JsonLines(run / "steps.jsonl")] if log else []
    found += [loops.Checkpoint(run / "ckpt", every=every, keep=4, run={"name": name})] if saves else []
    return loops.Loop(step, numbers() if dataset is None else dataset, actions=[*found, *actions], **arguments)


def listing(place):
    """Every file and folder with its time, size and digest."""
    return {
        str(path): (
            path.stat().st_mtime_ns,
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in [place, *place.rglob("*")]
    }


def plain(batch):
    """A batch as lists."""
    return [np.asarray(part).tolist() for part in tf.nest.flatten(batch)]


def taken(dataset, count):
    """The first batches of a dataset, from 1 on."""
    return {number: plain(batch) for number, batch in zip(range(1, count + 1), dataset, strict=False)}
