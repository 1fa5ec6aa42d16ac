"""A program whose log has some of its steps."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

STEPS = 60


def thinned_loop(folder, bad, every=10, actions=()):
    """A run of `STEPS` steps of which those in `bad` are skipped, with a line in the log for every tenth."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="one", dtype="mixed_float16")])
    x = np.ones([STEPS, 4, 2], np.float32)
    x[[step - 1 for step in bad]] = 1e30
    step = loops.TrainStep(
        model,
        keras.losses.MeanSquaredError(),
        keras.optimizers.SGD(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(8.0)),
    )
    data = tf.data.Dataset.from_tensor_slices((x, np.ones([STEPS, 4, 1], np.float32)))
    saves = loops.Checkpoint(folder / "checkpoints", every=20, resume=True)
    log = loops.JsonLines(folder / "steps.jsonl", every=every)
    return loops.Loop(step, data, actions=[log, *actions, saves], jit_compile=False)
