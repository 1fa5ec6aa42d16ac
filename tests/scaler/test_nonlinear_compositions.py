"""Random functions of scaled losses: what is refused trains otherwise at some scale, and what is not does not."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scaler_cases import plain_descent

import scaler
from scaler.misuse.trace import units_of
from scaler.misuse.units import Unknown

OF_ONE = {
    "square": tf.square,
    "root": lambda x: tf.sqrt(tf.abs(x)),
    "cube": lambda x: tf.pow(x, 3.0),
    "inverse": tf.math.reciprocal,
    "abs": tf.abs,
    "relu": tf.nn.relu,
    "negative": tf.negative,
    "exp": tf.exp,
    "tanh": tf.tanh,
    "log": lambda x: tf.math.log(tf.abs(x)),
    "and its square": lambda x: x + tf.square(x),
    "by its size": lambda x: x / tf.stop_gradient(tf.abs(x)),
    "stopped": tf.stop_gradient,
    "finite": lambda x: tf.where(tf.math.is_finite(x), x, tf.zeros_like(x)),
}
OF_TWO = {
    "add": tf.add,
    "subtract": tf.subtract,
    "multiply": tf.multiply,
    "divide": tf.divide,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "mean": lambda x, y: tf.reduce_mean(tf.stack([x, y]), 0),
    "largest": lambda x, y: tf.reduce_max(tf.stack([x, y]), 0),
    "differ": tf.math.squared_difference,
    "choice": lambda x, y: tf.where(x < y, 2.0 * x, y),
}
FUNCTIONS = st.recursive(
    st.sampled_from(["loss", "loss", "constant"]),
    lambda parts: (
        st.tuples(st.sampled_from(sorted(OF_ONE)), parts) | st.tuples(st.sampled_from(sorted(OF_TWO)), parts, parts)
    ),
    max_leaves=5,
)
POINTS = 400


def value(function, losses, constants):
    """The value of a function. It takes each of its losses and constants from an iterator, and each is another one."""
    if isinstance(function, str):
        return next(constants if function == "constant" else losses)
    name, *parts = function
    return {**OF_ONE, **OF_TWO}[name](*(value(part, losses, constants) for part in parts))


def judged(function):
    """Whether a step with a function is refused, and whether the units of its whole backward pass are known."""
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(8.0)), tf.Variable([1.0, 2.0, 3.0, 4.0, 5.0])
    known = []

    def step():
        with tf.GradientTape() as tape:
            losses = [loss_scaler.scale(weights[index]) for index in range(5)]
            loss = value(function, iter(losses), map(tf.constant, (1.5, 3.0, 5.0, 7.0, 9.0)))
        grad = tape.gradient(loss, weights)
        assume(grad is not None)
        backward = [op for op in grad.graph.get_operations() if op.name.startswith("gradient_tape/")]
        units = units_of([one for op in backward for one in op.outputs], [weights])
        known.append(not any(isinstance(unit, Unknown) for unit in units))
        loss_scaler.apply(plain_descent, [grad], [weights])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tf.function(step, autograph=False).get_concrete_function()
        except scaler.InvalidArgument:
            return True, known[0]
    return False, known[0]


def trains_otherwise(function):
    """Whether the gradients at some scale and some point are not the scale times those at a scale of 1."""
    rng = np.random.default_rng(0)
    losses = tf.constant(rng.normal(size=[5, POINTS]) * 2.0)
    constants = [tf.constant(rng.normal(size=POINTS) * 3.0) for _ in range(5)]

    def grads(scale):
        with tf.GradientTape() as tape:
            tape.watch(losses)
            loss = value(function, iter(tf.unstack(losses * scale)), iter(constants))
        return tape.gradient(loss, losses).numpy() / scale

    plain = grads(1.0)
    for scale in (0.25, 3.0):
        scaled = grads(scale)
        seen = np.isfinite(plain) & np.isfinite(scaled)
        if not np.allclose(plain[seen], scaled[seen], rtol=1e-6, atol=1e-9):
            return True
    return False


@pytest.mark.exhaustive
@settings(max_examples=settings.default.max_examples // 2)
@given(FUNCTIONS)
def test_a_function_is_refused_if_and_only_if_it_trains_otherwise(function):
    refused, known = judged(function)
    assume(refused or known)
    assert refused == trains_otherwise(function)
