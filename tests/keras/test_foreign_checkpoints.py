"""Checkpoints of other optimizers: taken over, or refused in a sentence; never half of them in silence."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler

KINDS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "EMA": lambda: keras.optimizers.Adam(0.1, use_ema=True),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
}


def trained(optimizer, steps=3):
    variable = keras.Variable(np.ones([3, 2], np.float32))
    for _ in range(steps):
        loss = optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([loss * tf.ones([3, 2])], [variable])
    return variable


@pytest.mark.parametrize(("kind", "built"), [*((kind, True) for kind in KINDS), ("Adam", False)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "of Keras"])
def test_one_of_keras_is_taken_over_and_one_that_was_not_wrapped_in_the_way_that_is_named(
    wrapped, kind, built, tmp_path
):
    plain = KINDS[kind]()
    foreign = keras.optimizers.LossScaleOptimizer(plain, initial_scale=4.0) if wrapped else plain
    trained(foreign)
    path = tf.train.Checkpoint(optimizer=foreign).write(str(tmp_path / "foreign"))
    variable = keras.Variable(np.ones([3, 2], np.float32))
    optimizer = scaler.LossScaleOptimizer(KINDS[kind](), scaler.Static(2.0))
    if built:
        optimizer.build([variable])
    if wrapped:
        tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    else:
        with pytest.raises(scaler.InvalidArgument, match=r"was not wrapped.*inner_optimizer"):
            tf.train.Checkpoint(optimizer=optimizer).read(path)
        status = tf.train.Checkpoint(optimizer=optimizer.inner_optimizer).read(path)
    optimizer.build([variable])
    if built and not wrapped:
        status.assert_existing_objects_matched()
    assert int(optimizer.iterations) == 3
    for own, other in zip(optimizer.inner_optimizer.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))


@pytest.mark.parametrize(("saved", "now"), [(2, None), (None, 2)])
def test_one_of_ours_with_or_without_a_window_is_no_foreign_one(saved, now, tmp_path):
    def make(steps, taken):
        variable = keras.Variable(np.ones([3, 2], np.float32), dtype="float16")
        inner = keras.optimizers.Adam(0.1, gradient_accumulation_steps=steps)
        optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(2.0))
        optimizer.build([variable])
        for _ in range(taken * (steps or 1)):
            optimizer.apply([optimizer.loss_scale * tf.ones([3, 2])], [variable])
        return optimizer

    path = tf.train.Checkpoint(optimizer=make(saved, 4)).write(str(tmp_path / "ours"))
    optimizer = make(now, 0)
    tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    assert int(optimizer.inner_optimizer._iterations) == 4 * (saved or 1)


def test_weights_of_an_optimizer_are_set_whole():
    optimizers = [scaler.LossScaleOptimizer(keras.optimizers.Adam(0.1), scaler.Dynamic(8.0)) for _ in range(2)]
    trained(optimizers[0], 3), trained(optimizers[1], 1)
    optimizers[1].set_weights([np.asarray(variable) for variable in optimizers[0].variables])
    for one, other in zip(*(optimizer.variables for optimizer in optimizers), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    with pytest.raises(scaler.InvalidArgument, match=r"set_weights: 1 arrays for .* variables"):
        optimizers[1].set_weights([np.zeros([])])
