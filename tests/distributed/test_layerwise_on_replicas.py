"""Guards layer-wise scales on replicas: every scale moves by what all replicas saw, alike on each."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from mirrored import one_for_each

import scaler


class ToldState(NamedTuple):
    loss_scale: tf.Tensor
    finite: tf.Tensor
    amax: tf.Tensor
    deviation: tf.Tensor
    entering: tf.Tensor
    updates: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Told:
    """Keeps what it was told last; a group that was not observed keeps what was told before."""

    def init(self):
        return ToldState(*map(tf.constant, (4.0, True, 0.0, 0.0, 0.0, 0)))

    def update(self, state, event):
        return ToldState(state.loss_scale, event.finite, event.amax, event.deviation, event.entering, state.updates + 1)


FIRST, SECOND = 1.0, 0.5


def written(strategy, rule):
    """A step on replicas: `far`, one weight times x, then `near`, another, and the loss is its output times c."""
    with strategy.scope():
        first, second = tf.Variable(FIRST), tf.Variable(SECOND)
        layerwise = scaler.layerwise.Layerwise({"near": [second], "far": [first]}, strategy=rule)
        loss_scaler = scaler.LossScaler(scaler.NoScaling())

    def on_replica(x, c):
        with tf.GradientTape() as tape:
            hidden = layerwise.rescale(first * x, "far")
            scaled = loss_scaler.scale(layerwise.rescale(hidden * second, "near") * c)
        grads, seen = layerwise.gradient(tape, scaled, [first, second])
        outcome = loss_scaler.apply(keep, grads, [first, second])
        layerwise.update(seen)
        return outcome.finite, outcome.grad_norm

    @tf.function
    def run(x, c):
        found = strategy.run(on_replica, args=(one_for_each(strategy, x), one_for_each(strategy, c)))
        return [tf.stack(strategy.experimental_local_results(value)) for value in found]

    return lambda x, c: run(tf.constant(x), tf.constant(c)), layerwise


def keep(grads, variables):
    """An optimizer that moves nothing."""
    del grads, variables


def expected(x, c):
    """What `near` and `far` are told, in NumPy, from the replicas whose gradient is not zero."""
    x, c = np.array(x)[np.array(c) != 0], np.array(c)[np.array(c) != 0]
    near = np.abs([c, c * FIRST * x, c * SECOND])  # What enters, the weight's gradient, what leaves.
    far = np.abs([c * SECOND, c * SECOND * x])
    return {
        "amax": [near.max(), far.max()],
        "deviation": [near.min(), far.min()],
        "entering": [np.abs(c).max(), np.abs(c * SECOND).max()],
    }


@pytest.fixture(scope="module")
def told():
    return written(cases.mirrored(2), Told())


@pytest.mark.slow
@pytest.mark.parametrize(("x", "c"), [([2.0, 0.25], [1.0, 8.0]), ([2.0, 0.25], [16.0, 1.0]), ([4.0, 3.0], [2.0, 0.0])])
def test_all_replicas_are_told_together(told, x, c):
    run, layerwise = told
    before = layerwise.state.updates.numpy()
    finite, norm = run(x, c)
    assert finite.numpy().all()
    true = np.array([np.dot(np.multiply(SECOND, x), c), np.dot(np.multiply(FIRST, x), c)])
    np.testing.assert_allclose(norm[0], np.linalg.norm(true), rtol=1e-6)
    for field, values in expected(x, c).items():
        np.testing.assert_array_equal(getattr(layerwise.state, field).numpy(), values, err_msg=field)
    np.testing.assert_array_equal(layerwise.state.updates, before + 1)
    assert cases.agree(layerwise.variables)


@pytest.mark.slow
def test_an_overflow_on_one_replica_lowers_the_groups_scale_on_all():
    run, layerwise = written(cases.mirrored(2), scaler.Dynamic(4.0))
    start = cases.components(layerwise.variables)
    for replica in (0, 1):
        cases.assign(layerwise.variables, start)
        c = [1.0, 1.0]
        c[replica] = 1e38  # At the group's scale of 4 an infinity.
        finite, _ = run([1.0, 1.0], c)
        assert not finite.numpy().any()
        assert cases.agree(layerwise.variables)
        np.testing.assert_array_equal(layerwise.scales.numpy(), [2.0, 4.0])


@pytest.mark.slow
def test_without_replicas_it_tells_its_own():
    run, layerwise = written(tf.distribute.get_strategy(), Told())
    run([2.0], [1.0])
    for field, values in expected([2.0], [1.0]).items():
        np.testing.assert_array_equal(getattr(layerwise.state, field).numpy(), values, err_msg=field)
