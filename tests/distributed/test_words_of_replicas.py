"""What each replica says of a step counts: the `finite` of an event, its `amax`, and `when` of an `apply`."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_cases import mirrored, raw
from scaler_cases import steep
from ways import second_look

import scaler
from scaler.strategies import Needs, StaticState

COUNTS = [2, 3]


class Following:
    """A strategy whose scale is the last amax."""

    needs = Needs(amax=True)

    def init(self):
        return StaticState(tf.constant(1.0))

    def update(self, state, event):
        return StaticState(tf.where(event.finite, event.amax, 0.5))


class Rig:
    """A step that is given one number for each replica; compiled."""

    def __init__(self, replicas, step, strategy=None):
        self.strategy = mirrored(replicas)
        with self.strategy.scope():
            self.weights = [tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])]
            self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
            for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
                optimizer.build([weight])
            self.loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic(1024.0))
        self._run = tf.function(lambda shares: self.strategy.run(lambda x: step(self, x), args=(shares,)))

    def __call__(self, numbers):
        shares = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(numbers[context.replica_id_in_sync_group])
        )
        return self.strategy.experimental_local_results(self._run(shares))


def long_form(rig, x):
    with tf.GradientTape() as tape:
        scaled = rig.loss_scaler.scale(tf.reduce_sum(steep(rig.weights[0], x)))
    finite = scaler.all_finite(rig.loss_scaler.unscale(tape.gradient(scaled, rig.weights[:1])))
    rig.loss_scaler.update(scaler.Event(finite))
    return finite


def with_infinity(replicas, replica):
    return [float("inf") if own == replica else 1.0 for own in range(replicas)]


@pytest.mark.parametrize("replicas", COUNTS)
def test_an_event_is_finite_if_it_is_on_all_replicas(replicas):
    rig = Rig(replicas, long_form)
    for skipped, replica in enumerate(range(replicas), start=1):
        rig(with_infinity(replicas, replica))
        assert int(rig.loss_scaler.counters.skipped) == skipped
        assert float(rig.loss_scaler.loss_scale) == 1024.0 / 2**skipped
    rig([1.0] * replicas)
    assert int(rig.loss_scaler.counters.applied) == 1


def stored(rig):
    return float(rig.loss_scaler._state["loss_scale"].numpy())


@pytest.mark.slow_with("3")
@pytest.mark.parametrize("replicas", COUNTS)
def test_the_largest_amax_of_any_replica_counts(replicas):
    def step(rig, x):
        rig.loss_scaler.update(scaler.Event(tf.constant(True), amax=x))
        return x

    rig = Rig(replicas, step, Following())
    for replica in range(replicas):
        numbers = [8.0 + replica if own == replica else 2.0 for own in range(replicas)]
        rig(numbers)
        assert stored(rig) == 8.0 + replica
        rig([float("nan") if own == replica else 2.0 for own in range(replicas)])
        assert stored(rig) == np.inf


def two_optimizers(rig, x):
    """The step of docs/composed_step.md: one decision for both."""
    body, head = rig.weights
    with tf.GradientTape() as tape:
        loss = (tf.reduce_sum(body) + tf.reduce_sum(head * x)) / rig.strategy.num_replicas_in_sync
        scaled = rig.loss_scaler.scale(loss)
    grads = tape.gradient(scaled, [body, head])
    together = scaler.all_finite(rig.loss_scaler.unscale(grads))
    moved = [
        rig.loss_scaler.apply(optimizer, [grad], [weight], update=False, when=together).finite
        for optimizer, grad, weight in zip(rig.optimizers, grads, rig.weights, strict=True)
    ]
    applied = tf.reduce_all(moved)
    rig.loss_scaler.update(scaler.Event(applied))
    return applied


@pytest.mark.slow_with("3")
@pytest.mark.parametrize("replicas", COUNTS)
def test_replicas_that_disagree_about_when_move_nothing(replicas):
    rig = Rig(replicas, two_optimizers)
    before = raw(rig.weights)
    for replica in range(replicas):
        assert not any(map(bool, rig(with_infinity(replicas, replica))))
        assert raw(rig.weights) == before
        assert int(rig.loss_scaler.counters.skipped) == replica + 1
    assert all(map(bool, rig([1.0] * replicas)))
    assert all(now != then for now, then in zip(raw(rig.weights), before, strict=True))


@second_look
def test_counts_are_not_summed_over_replicas():
    """A micro-batch inside of a window waits for no other replica."""
    strategy = mirrored(2)
    with strategy.scope():
        count = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def meetings_before_the_branch(when):
        def step(rig, x):
            rig.loss_scaler.scale(x)
            grads, weights = [x * tf.ones([2])], rig.weights[:1]
            return rig.loss_scaler.apply(rig.optimizers[0], grads, weights, when=when(x)).finite

        shares = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(1.0))
        graph = Rig(2, step)._run.get_concrete_function(shares).graph
        found = Counter(op.type for op in graph.get_operations())
        # Replicas of one process compare their flags, those of several processes add them up.
        return found["AddN"], found["LogicalAnd"]

    sums, compared = meetings_before_the_branch(lambda x: tf.equal(count % 2, 0))
    assert sums == 0
    assert meetings_before_the_branch(lambda x: x > 0.0) == (0, compared + 1)
