"""A run whose optimizer keeps slots in buffers is saved, and goes on, as any other."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler

LAYERS, STEPS = 36, 6


def make(folder, stop_at, resume):
    """A run of a model with so many small variables that their slots are kept in buffers."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((4,)), *(keras.layers.Dense(4) for _ in range(LAYERS)), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    step = loops.TrainStep(
        model, keras.losses.MeanSquaredError(), optimizer, loss_scaler=scaler.LossScaler(scaler.Static(8.0))
    )
    x = np.random.default_rng(0).normal(size=(STEPS * 8, 4)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8, drop_remainder=True).repeat()
    actions = [loops.Checkpoint(folder, every=stop_at, resume=resume)] if folder else []
    loop = loops.Loop(step, dataset, steps_per_call=3, actions=actions)
    loop.run(stop_at)
    return model, optimizer


def values(model, optimizer):
    return [tf.convert_to_tensor(variable).numpy() for variable in (*model.variables, *optimizer.variables)]


@pytest.fixture(scope="module")
def whole():
    return values(*make(None, STEPS, False))


def test_the_slots_are_in_buffers():
    _, optimizer = make(None, 3, False)
    assert "_scaler_packed" in vars(optimizer)


def test_three_steps_and_three_in_another_run_are_six(whole, tmp_path):
    make(tmp_path / "run", 3, False)
    found = values(*make(tmp_path / "run", STEPS, True))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, whole, strict=True))


def test_weights_and_slots_read_in_between_are_those_of_the_run(whole, tmp_path):
    model, optimizer = make(tmp_path / "run", 3, False)
    before = values(model, optimizer)
    again = values(*make(tmp_path / "run", 3, True))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(before, again, strict=True))
    assert any(one.tobytes() != other.tobytes() for one, other in zip(before, whole, strict=True))
