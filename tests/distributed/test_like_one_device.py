"""Training on 2 replicas equals training on one device with the concatenated batch, to the rounding of a reduction.

Guards against gradients summed twice, averaged twice, or clipped by replica.
"""

import functools

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


@pytest.mark.dear("traces the same step on one device and on several")
def test_as_one_device_on_the_concatenated_batch():
    one, two = (
        cases.Rig(
            strategy,
            functools.partial(models.one_layer, "float16"),
            lambda: descent,
            kind="float16",
            clip=scaler.ClipByNorm(0.2),
        )
        for strategy in (tf.distribute.get_strategy(), cases.mirrored(2))
    )
    batches = [cases.batch(seed) for seed in range(6)]
    expected, outputs = one.run(batches), two.run(batches)
    assert outputs["applied"].all()
    assert expected["applied"].all()
    # In float16 the two halves of a batch round separately.
    for name in ("loss", "grad_norm", "clipped_norm"):
        np.testing.assert_allclose(outputs[name], expected[name], rtol=2e-3)
    assert (outputs["clipped_norm"] < 0.9 * outputs["grad_norm"]).all()
    assert cases.agree(two.weights())
    for variable, ours, theirs in zip(
        one.weights(), cases.components(two.weights()), cases.components(one.weights()), strict=True
    ):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-3, atol=2e-4, err_msg=str(variable))
