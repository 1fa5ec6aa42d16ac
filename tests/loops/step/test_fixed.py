"""Guards that a compiled step refuses what was changed since it was traced, in place of ignoring it."""

import keras
import pytest
import tensorflow as tf
from models import batch, squared_error

import loops
import scaler


def made():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1))


def replace_the_head(step):
    step.model.pop()
    step.model.add(keras.layers.Dense(1))


CHANGES = {
    "the model's layers": replace_the_head,
    "optimizer": lambda step: setattr(step, "optimizer", keras.optimizers.SGD(0.0)),
    "loss_fn": lambda step: setattr(step, "loss_fn", lambda y, p: squared_error(y, p)),
    "loss_scaler": lambda step: setattr(step, "loss_scaler", scaler.LossScaler()),
    "clip_norm": lambda step: setattr(step, "clip_norm", 1e-9),
    "clip": lambda step: setattr(step, "clip", scaler.ClipByValue(1.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_the_trace_is_refused_with_its_name(what):
    step = made()
    call = tf.function(step)
    data = tuple(map(tf.constant, batch()))
    call(data)
    call(data)
    before = [variable.numpy() for variable in step.model.variables]
    CHANGES[what](step)
    with pytest.raises(scaler.InvalidArgument, match=rf"changed since it was traced: {what}\. .* Make a new TrainStep"):
        call(data)
    assert all((old == new.numpy()).all() for old, new in zip(before[:2], step.model.variables, strict=False))


def test_a_loop_refuses_it_as_well():
    step = made()
    loop = loops.Loop(step, tf.data.Dataset.from_tensors(batch()).repeat())
    loop.run(3)
    step.clip_norm = 1e-9
    with pytest.raises(scaler.InvalidArgument, match="changed since it was traced: clip_norm"):
        loop.run(6)


def test_without_a_trace_a_change_takes_effect():
    step = made()
    step(batch())
    step.clip_norm = 0.5
    assert float(step(batch())["clipped_norm"]) <= 0.5001
