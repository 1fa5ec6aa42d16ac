"""What each replica says of a step counts: the `finite` of an event, its `amax`, and `when` of an `apply`."""

import contextlib
from collections import Counter

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from replica_cases import mirrored, raw
from scaler_cases import steep
from ways import second_look

import loops
import scaler
from scaler import observe
from scaler.strategies import Needs, StaticState

ONE_INFINITE = [[np.inf, 1.0], [1.0, np.inf]]


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


def test_an_event_is_finite_if_it_is_on_all_replicas():
    rig = Rig(2, long_form)
    for skipped, numbers in enumerate(ONE_INFINITE, start=1):
        rig(numbers)
        assert int(rig.loss_scaler.counters.skipped) == skipped
        assert float(rig.loss_scaler.loss_scale) == 1024.0 / 2**skipped
    rig([1.0, 1.0])
    assert int(rig.loss_scaler.counters.applied) == 1


def stored(rig):
    return float(rig.loss_scaler._state["loss_scale"].numpy())


@pytest.mark.slow_with("3")
@pytest.mark.parametrize("replicas", [2, 3])
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


def test_replicas_that_disagree_about_when_move_nothing():
    rig = Rig(2, two_optimizers)
    before = raw(rig.weights)
    for skipped, numbers in enumerate(ONE_INFINITE, start=1):
        assert not any(map(bool, rig(numbers)))
        assert raw(rig.weights) == before
        assert int(rig.loss_scaler.counters.skipped) == skipped
    assert all(map(bool, rig([1.0, 1.0])))
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


def own(number):
    """Of each replica another value: 1 on the first, -2 on the second; NaN in one place of either."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    value = tf.where(tf.equal(index, 0), 1.0, -2.0)
    nan = float("nan")
    first = tf.where(tf.equal(index, 0), nan, 1.0)
    return {
        "loss": tf.reduce_mean(number),
        "counts": tf.stack([tf.cast(index, tf.int64) + 1, 10]),
        "amax": tf.stack([value, first, 3.0]),
        "floats": tf.stack([value, 4.0]),
        "flags": tf.stack([tf.equal(index, 0)]),
        "whole": index + 5,
    }


@pytest.mark.slow_with("1")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_vectors_are_joined_by_what_they_are(steps_per_call):
    strategy, seen = cases.mirrored(2), []
    data = tf.data.Dataset.from_tensor_slices(np.zeros([4, 2], np.float32))
    loops.Loop(own, data, steps_per_call=steps_per_call, strategy=strategy, actions=[seen.append]).run(2)
    vectors = seen[-1].vectors
    np.testing.assert_array_equal(vectors["counts"][-1], [3, 20])
    np.testing.assert_array_equal(vectors["amax"][-1], [1, np.nan, 3])
    np.testing.assert_array_equal(vectors["floats"][-1], [-0.5, 4])
    np.testing.assert_array_equal(vectors["flags"][-1], [True])
    assert seen[-1].outputs["whole"][-1] == 5


def watched(replicas, batches, model, kinds, accumulate=1, every=1):
    """What the probes of a model are called, and the vectors of the last step."""
    strategy = cases.mirrored(replicas) if replicas > 1 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model()
        watch = observe.watch(model, kinds=kinds, every=every)
        optimizer, loss_scaler = keras.optimizers.SGD(0.125), scaler.LossScaler(scaler.Static(8.0))
        step = loops.TrainStep(
            model, cases.squared_error, optimizer, loss_scaler=loss_scaler, probes=watch, accumulate=accumulate
        )
    data = tf.data.Dataset.from_tensor_slices(tuple(np.stack(part) for part in zip(*batches, strict=True)))
    seen = []
    loops.Loop(step, data, steps_per_call=2, strategy=strategy, actions=[seen.append]).run(len(batches))
    return watch.names, seen[-1].vectors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("window", "every"), [(1, 2), (2, 1)])
def test_noise_and_updates_of_replicas_are_those_of_micro_batches(window, every):
    whole, kinds = [cases.batch(seed) for seed in range(2)], ["noise_scale", "update_rms", "weights"]
    half = len(whole[0][0]) // 2
    halves = [tuple(part[at : at + half] for part in one) for one in whole for at in (0, half)]
    _, replicas = watched(2, whole, cases.plain_model, kinds, window, every)
    _, alone = watched(1, halves, cases.plain_model, kinds, 2 * window, every)
    assert np.isfinite(alone["noise_scale"][-1]).all()
    for name in ("noise_scale", "update_rms", "update_ratio"):
        np.testing.assert_allclose(replicas[name][-1], alone[name][-1], rtol=1e-4, err_msg=name)
