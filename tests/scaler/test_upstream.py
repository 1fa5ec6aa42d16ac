"""Guards that a call looks at each tensor upstream of its gradients once, however many rules ask for it."""

import contextlib

import keras
import pytest
import tensorflow as tf

import scaler
from scaler.misuse import upstream


@pytest.fixture
def looked_at(monkeypatch):
    """The tensors that were looked at, each with the functions entered on the way to it."""
    seen, sources_of = [], upstream.sources_of

    def recorded(tensor, calls):
        seen.append((tensor.ref(), calls))
        return sources_of(tensor, calls)

    monkeypatch.setattr(upstream, "sources_of", recorded)
    return seen


class Step:
    """Two layers with a stopped gradient between them. `grads_of` makes what is applied of two lists of gradients."""

    def __init__(self, grads_of, scales=True, **options):
        self.grads_of, self.scales, self.options = grads_of, scales, options
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10), select=True)
        self.optimizer = keras.optimizers.SGD(1.0)
        self.weights = [tf.Variable(tf.ones([3, 3])), tf.Variable(tf.ones([3]))]

    def trace(self, looked_at):
        assert self.loss_scaler.loss_scale == 2.0**10  # Who logs the scale has not scaled a loss.

        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                hidden = tf.tanh(x @ self.weights[0])
                loss = tf.reduce_mean(tf.square(hidden + tf.stop_gradient(hidden) * self.weights[1]))
                scaled = self.loss_scaler.scale(loss) if self.scales else loss
            scaled, plain = tape.gradient(scaled, self.weights), tape.gradient(loss, self.weights)
            grads = self.grads_of(self.loss_scaler, scaled, plain)
            looked_at.clear()
            self.loss_scaler.apply(self.optimizer, grads, self.weights, **self.options)

        tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([2, 3]))


def given(loss_scaler, scaled, plain):
    return scaled


def sums(loss_scaler, scaled, plain):
    return [one + other for one, other in zip(scaled, plain, strict=True)]


def half_unscaled(loss_scaler, scaled, plain):
    return [*loss_scaler.unscale(scaled[:1]), *scaled[1:]]


STEPS = {
    "scaled": (lambda: Step(given), None),
    "sums": (lambda: Step(sums), "only a part of them comes from a scaled loss"),
    "not scaled": (lambda: Step(given, scales=False), "nothing that they are computed from comes from scale"),
    "half unscaled": (lambda: Step(half_unscaled, unscaled=True), "too large by this factor"),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_tensor_is_looked_at_twice(looked_at, name):
    step, warning = STEPS[name]
    with pytest.warns(scaler.ScaleWarning, match=warning) if warning else contextlib.nullcontext():
        step().trace(looked_at)
    assert looked_at
    assert len(set(looked_at)) == len(looked_at)
