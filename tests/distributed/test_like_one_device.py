"""Training on 2 replicas equals training on one device with the concatenated batch, to the rounding of a reduction.

Guards against gradients summed twice, averaged twice, or clipped by replica. With a power-of-two scale, the same bits
as with none.
"""

import functools

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import scaler


def descent(grads, variables):
    """A plain function, called once on each replica with that replica's gradients."""
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(0.1 * tf.convert_to_tensor(grad))


def embedding_model():
    """Repeated rows on and across replicas: gradients are `tf.IndexedSlices`. One layer is not used by the loss."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([4])
    rows = keras.layers.Embedding(3, 5)(keras.ops.cast(keras.ops.abs(inputs), "int32") % 3)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    unused = keras.layers.Dense(2)(inputs)
    return keras.Model(inputs, [outputs, unused])


def first_squared_error(y, predictions):
    return cases.squared_error(y, predictions[0])


class Regularised(keras.losses.Loss):
    """A Keras loss of one's own."""

    def call(self, y, prediction):
        return tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y), -1)


HALF = functools.partial(models.plain_model, "float16")


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
SETUPS = {
    "Adam with EMA and decay, Keras loss": (
        models.plain_model,
        lambda: ADAM(0.01, use_ema=True, ema_momentum=0.5, weight_decay=0.01),
        {"loss_fn": keras.losses.MeanSquaredError()},
    ),
    "masters, momentum, clip_norm": (HALF, lambda: SGD(0.1, momentum=0.9), {"kind": "float16", "clip_norm": 0.5}),
    "global_clipnorm, own loss": (
        models.plain_model,
        lambda: ADAM(0.01, global_clipnorm=0.3),
        {"loss_fn": Regularised()},
    ),
    "plain function, clip_norm": (models.plain_model, lambda: descent, {"clip_norm": 0.5}),
    "plain function, masters, ClipByNorm": (
        functools.partial(models.one_layer, "float16"),
        lambda: descent,
        {"kind": "float16", "clip": scaler.ClipByNorm(0.2)},
    ),
    "ClipByValue": (models.plain_model, lambda: SGD(0.1), {"clip": scaler.ClipByValue(0.05)}),
    "embedding": (embedding_model, lambda: ADAM(0.01), {"loss_fn": first_squared_error, "clip_norm": 0.5}),
}


@pytest.mark.dear("traces the same step on one device and on several")
@pytest.mark.exhaustive_with(
    "Adam with EMA and decay, Keras loss",
    "ClipByValue",
    "embedding",
    "global_clipnorm, own loss",
    "masters, momentum, clip_norm",
    "plain function, clip_norm",
)
@pytest.mark.filterwarnings("ignore:there is no gradient for 'dense:scaler.ScaleWarning")
@pytest.mark.parametrize("setup", SETUPS)
def test_as_one_device_on_the_concatenated_batch(setup):
    model, optimizer, arguments = SETUPS[setup]
    one = cases.Rig(tf.distribute.get_strategy(), model, optimizer, **arguments)
    two = cases.Rig(cases.mirrored(2), model, optimizer, **arguments)
    batches = [cases.batch(seed) for seed in range(6)]
    expected, outputs = one.run(batches), two.run(batches)
    assert outputs["applied"].all()
    assert expected["applied"].all()
    # In float16 the two halves of a batch round separately.
    tolerance = 2e-3 if arguments.get("kind") == "float16" else 1e-5
    np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=tolerance)
    for norm in ("grad_norm", "clipped_norm"):
        np.testing.assert_allclose(outputs[norm], expected[norm], rtol=tolerance)
    clips = any(name.startswith("clip") for name in arguments)
    assert (outputs["clipped_norm"] < 0.9 * outputs["grad_norm"]).all() == clips
    assert cases.agree(two.weights())
    for variable, ours, theirs in zip(
        one.weights(), cases.components(two.weights()), cases.components(one.weights()), strict=True
    ):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=tolerance, atol=tolerance / 10, err_msg=str(variable))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_power_of_two_scale_changes_no_bit():
    bits = []
    for scaling in (scaler.NoScaling(), scaler.Dynamic(2.0**40, growth_interval=2)):
        rig = cases.Rig(
            cases.mirrored(2), models.plain_model, lambda: ADAM(0.01), scaling=scaling, steps_per_call=3, clip_norm=0.5
        )
        rig.run([cases.batch(seed) for seed in range(6)])
        bits.append(cases.raw(rig.weights()))
    assert bits[0] == bits[1]
