"""Guards what replicas make of statistics: events that carry them, and their merging."""

import numpy as np
import replica_cases as cases
import tensorflow as tf

from scaler import Event, Headroom, Histogram, LossScaler, Static, all_finite
from scaler.statistics import Needs, Statistics, measure, merge

NEEDS = Needs(amax=True, edges=(1.0,))


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


def test_merged_statistics_of_replicas_are_those_of_all_their_gradients():
    strategy = cases.mirrored(2)
    parts = [tf.constant([0.5, -3.0, 1.0]), tf.constant([2.0, np.nan, -0.25])]

    @tf.function
    def step():
        def on_replica(grad):
            own = measure(NEEDS, [grad], [grad])
            context = tf.distribute.get_replica_context()
            everyone = tf.nest.map_structure(lambda value: context.all_gather(value[None], axis=0), own)
            first, second = (tf.nest.map_structure(lambda value, i=i: value[i], everyone) for i in range(2))
            return merge(first, second)

        values = strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        return strategy.run(on_replica, args=(values,))

    whole = measure(NEEDS, parts, parts)
    for replica in zip(*(strategy.experimental_local_results(value) for value in step()), strict=True):
        found = Statistics(*replica)
        assert found.amax.numpy() == whole.amax.numpy() == np.inf
        np.testing.assert_array_equal(found.histogram.numpy(), whole.histogram.numpy())
    assert not all_finite(parts).numpy()
