"""Guards what replicas make of statistics: events that carry them, and what a step counts over replicas."""

import pytest
import replica_cases as cases
import tensorflow as tf

from scaler import Event, Headroom, Histogram, LossScaler, Static


@pytest.mark.slow
def test_an_update_on_replicas_takes_events_with_and_without_statistics():
    strategy = cases.mirrored(2)
    with strategy.scope():
        plain, following = LossScaler(Static(4.0)), LossScaler(Headroom(headroom=1))

    @tf.function
    def step(amax):
        def on_replica():
            plain.update(Event(tf.constant(True)))
            following.update(Event(tf.constant(True), amax=amax))

        strategy.run(on_replica)

    step(tf.constant(4.5))
    assert plain.counters.applied.numpy() == 1
    assert following.loss_scale.numpy() == 2.0**12


@pytest.mark.exhaustive
def test_a_step_on_replicas_shows_the_amax_of_the_sum_and_the_counts_of_all():
    strategy = cases.mirrored(2)
    with strategy.scope():
        weights = tf.Variable([1.0, 2.0])
        following, counting = LossScaler(Headroom()), LossScaler(Histogram(2.0**10, edge=3000.0))

    @tf.function
    def step():
        def on_replica():
            for loss_scaler in (following, counting):
                with tf.GradientTape() as tape:
                    scaled = loss_scaler.scale(tf.reduce_sum(weights * [4.0, 1.0]))
                loss_scaler.apply(keep, tape.gradient(scaled, [weights]), [weights])

        strategy.run(on_replica)

    step()
    assert following.loss_scale.numpy() == 2.0**11  # Of 4 + 4, where one replica's 4 would leave 2^12.
    assert counting.loss_scale.numpy() == 2.0**9  # 2 of 4 values are above the edge, too many.


def keep(grads, variables):
    """An optimizer that moves nothing."""
