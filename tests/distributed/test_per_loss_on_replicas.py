"""Guards several losses on replicas: one replica's overflow in one loss skips for all, and lowers that loss's scale."""

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from mirrored import one_for_each

from scaler import Cause, Dynamic, Headroom, PerLoss
from scaler.weights import StochasticRounding

pytestmark = pytest.mark.slow


def written(strategy, make_weights=lambda: tf.Variable([1.0, 2.0]), wrap=lambda weights: [weights]):
    with strategy.scope():
        weights = make_weights()
        losses = PerLoss({"a": Dynamic(2.0**4), "b": Dynamic(2.0**30, growth_interval=2), "c": Headroom(headroom=1)})
        optimizer, targets = keras.optimizers.SGD(1.0, momentum=0.5), wrap(weights)

    def on_replica(factors):
        with tf.GradientTape(persistent=True) as tape:
            total = tf.reduce_sum(tf.cast(weights, tf.float32))
            scaled = losses.scale({name: total * factors[at] for at, name in enumerate("abc")})
        grads = {name: tape.gradient(loss, [weights]) for name, loss in scaled.items()}
        return losses.apply(optimizer, grads, targets)

    @tf.function
    def run(factors):
        outcome = strategy.run(on_replica, args=(one_for_each(strategy, factors),))
        return tf.nest.map_structure(lambda value: tf.stack(strategy.experimental_local_results(value)), outcome)

    return run, losses, weights, optimizer, targets


CLEAN = [0.125, 2.0**-20, 0.5]


@pytest.mark.exhaustive
def test_one_replicas_overflow_in_one_loss():
    run, losses, weights, optimizer, _ = written(cases.mirrored(2))
    with cases.mirrored(2).scope():
        optimizer.build([weights])
    moved = [weights, *optimizer.variables]
    start = cases.components([*moved, *losses.variables])
    for replica in (0, 1):
        cases.assign([*moved, *losses.variables], start)
        outcome = run(tf.constant([CLEAN, CLEAN]))
        assert outcome.finite.numpy().all()
        np.testing.assert_array_equal(weights.numpy(), np.float32([1, 2]) - np.float32(2 * sum(CLEAN)))
        assert losses["c"].loss_scale.numpy() == 2.0**14  # Of 0.5 + 0.5, where one replica's 0.5 would leave 2^15.
        before = cases.raw(moved)
        spoiled = [CLEAN, CLEAN]
        spoiled[replica] = [0.125, 1e35, 0.5]
        outcome = run(tf.constant(spoiled))
        assert not outcome.finite.numpy().any()
        assert set(outcome.cause.numpy()) == {Cause.OVERFLOW}
        assert set(outcome.loss_scale.numpy()) == {2.0**30}
        assert cases.raw(moved) == before
        assert [losses[name].loss_scale.numpy() for name in "abc"] == [2.0**4, 2.0**29, 2.0**14]
        assert [int(count) for count in losses.counters] == [2, 1, 1, 1]
        assert [int(losses[name].counters.skipped) for name in "abc"] == [0, 1, 0]
        assert cases.agree(moved)
        assert run(tf.constant([CLEAN, CLEAN])).finite.numpy().all()
        assert cases.finite([weights, *losses.variables])


@pytest.mark.exhaustive
def test_sixteen_bit_weights_round_alike_on_every_replica():
    run, losses, weights, _, rounding = written(
        cases.mirrored(2),
        lambda: tf.Variable(tf.ones([64], tf.bfloat16)),
        lambda weights: StochasticRounding([weights]),
    )
    for _ in range(3):
        assert run(tf.constant([[2.0**-10, 0.0, 0.0]] * 2)).finite.numpy().all()
    assert cases.agree([weights])
    assert len(np.unique(weights.numpy().astype(np.float32))) > 1
    assert 0 < rounding.swallowed.numpy() < 1
    assert int(losses.counters.applied) == 3
