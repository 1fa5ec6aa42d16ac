"""The run whose files are kept: `python tests/data/keep.py tests/data/0.3.0` adds those of a release.

Files of an earlier release are never made again: tests/test_kept_files.py reads what that release wrote.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile

import keras
import tensorflow as tf

import loops
import scaler

STEPS = 12
FILES = ("checkpoints", "steps.jsonl", "trace.arrow")


def make_loop() -> loops.Loop:
    """The loop of the run, which writes into the working folder. Some of its steps overflow float16 and are skipped."""
    keras.config.set_dtype_policy("float16")
    keras.utils.set_random_seed(0)
    tf.random.set_global_generator(tf.random.Generator.from_seed(0))
    x = tf.random.stateless_normal((64, 4), seed=(0, 1))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=0).repeat().batch(8)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1, dtype="float32", name="out"),
        ]
    )
    step = loops.TrainStep(
        model,
        keras.losses.MeanSquaredError(),
        keras.optimizers.Adam(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**18, growth_interval=4)),
        probes=scaler.observe.watch(model),
    )
    actions = [
        loops.JsonLines("steps.jsonl"),
        loops.Trace("trace.arrow", every=4),
        loops.Checkpoint("checkpoints", every=STEPS, keep=2, resume=True),
    ]
    return loops.Loop(step, dataset, steps_per_call=4, actions=actions)


def main(folder: str) -> None:
    """Makes the files in a new folder: the same bytes each time, with the same versions on the same kind of machine."""
    place = pathlib.Path(folder).absolute()
    # A checkpoint holds the paths of the run's files.
    working = pathlib.Path(tempfile.gettempdir()) / "halfstep-kept-run"
    working.mkdir()
    os.chdir(working)
    try:
        make_loop().run(STEPS)
        (working / "checkpoints" / "checkpoint").unlink()  # TensorFlow's, with times; nothing here reads it.
        for name in FILES:
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(working / name, target)
    finally:
        os.chdir(place.parent)
        shutil.rmtree(working)


if __name__ == "__main__":
    main(sys.argv[1])
