"""Guards checkpoints of a run whose strategy remembers a vector: the history of `DelayedAmax`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from halfstep import main

pytestmark = pytest.mark.slow


def run(folder, steps):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    loss_scaler = scaler.LossScaler(scaler.DelayedAmax(history_length=3))
    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.Adam(0.1), loss_scaler=loss_scaler)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8).repeat()
    actions = [loops.Checkpoint(folder, every=2, resume=True)] if folder else []
    loops.Loop(step, dataset, actions=actions).run(steps)
    return [value.numpy() for value in (*loss_scaler.state, *model.trainable_variables)]


@pytest.mark.exhaustive
def test_a_history_is_saved_shown_and_goes_on(tmp_path, capsys):
    whole = run(None, 8)
    half = run(tmp_path / "run", 4)
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert f"loss_scale {half[0]:g}  history of 3 numbers" in capsys.readouterr().out
    for found, wanted in zip(run(tmp_path / "run", 8), whole, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(half[1], whole[1])
