"""Guards the ends of the range: gradients survive the least and the greatest scale."""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes_with, plain_descent, take

import scaler

SMALLEST, LARGEST = 2.0**-126, 2.0**126


@pytest.mark.slow_with("xla-8.507059173023462e+37")
@modes_with(("loss_scale",), eager=[(SMALLEST,)], graph=[(LARGEST,)], xla=[(LARGEST,)])
def test_gradients_survive_the_least_and_the_greatest_scale(execute, loss_scale):
    gradient = np.float32([1.5, -(2.0**10)] if loss_scale == SMALLEST else [1.5, -(2.0**-10)])
    weight = tf.Variable([0.0, 0.0])
    loss_scaler = scaler.LossScaler(scaler.Static(loss_scale))

    def step(true):
        return take(loss_scaler, plain_descent, lambda: tf.reduce_sum(weight * true), [weight]).finite

    assert execute(step)(gradient)
    np.testing.assert_array_equal(weight.numpy(), -gradient)
