"""Guards what a `TrainStep` offers beside the update on 2 replicas: terms of a loss, averages, rates by attempts,
ragged batches, and a dataset that ends inside a call."""

import functools

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import loops
import scaler

HALVING = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)


def two_terms(y, prediction):
    fit, size = cases.squared_error(y, prediction), tf.reduce_mean(tf.cast(prediction, tf.float32))
    return fit + size, {"fit": fit, "size": size}


def batches(count, bad=None):
    parts = [cases.batch(seed) for seed in range(count)]
    if bad is not None:
        parts[bad] = cases.spoil(parts[bad], "data", 1, 2)
    return tf.data.Dataset.from_tensor_slices(tuple(np.stack(part) for part in zip(*parts, strict=True)))


def run(replicas, steps_per_call):
    """Five batches of which the third is bad, in a run that wants nine: what was seen, and the averaged weights."""
    strategy = cases.mirrored(replicas)
    with strategy.scope():
        loss_scaler = scaler.LossScaler(scaler.Static(8.0))
        model = models.one_layer("float16")
        optimizer = keras.optimizers.Adam(loops.ByAttempts(HALVING, loss_scaler), use_ema=True, ema_momentum=0.5)
        step = loops.TrainStep(model, two_terms, optimizer, loss_scaler=loss_scaler, clip=scaler.ClipByNorm(0.5))
    averaged, seen = loops.Averaged(model, optimizer), []
    measure = loops.Evaluate(averaged, batches(2), [keras.metrics.MeanSquaredError(name="mse")], every=5)
    data = batches(5, bad=2)
    loop = loops.Loop(step, data, steps_per_call=steps_per_call, strategy=strategy, actions=[seen.append, measure])
    with pytest.raises(loops.OutOfData, match="after 5 of 9 steps"):
        loop.run(9)
    assert loop.counters == loops.Counters(5, 5, 4)
    assert float(optimizer.learning_rate) == 2.0**-5
    columns = {name: np.concatenate([visit.outputs[name] for visit in seen]) for name in seen[0].outputs}
    assert cases.agree([*model.trainable_variables, *optimizer.variables])
    before = cases.raw([*model.variables, *optimizer.variables])
    with averaged.swapped():
        assert cases.agree(model.trainable_variables)
        inside = cases.raw(model.trainable_variables)
    assert cases.raw([*model.variables, *optimizer.variables]) == before
    assert inside != cases.raw(model.trainable_variables)
    return columns, averaged.weights(), measure.results["mse"]


@pytest.mark.slow
def test_two_replicas_do_as_one_device():
    columns, weights, error = run(2, 4)
    expected, expected_weights, expected_error = run(1, 1)
    good = [0, 1, 3, 4]
    for name in ("loss", "fit", "size", "grad_norm", "clipped_norm"):
        np.testing.assert_allclose(columns[name][good], expected[name][good], rtol=5e-3, atol=5e-4, err_msg=name)
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(error, expected_error, rtol=2e-2)


def test_each_replica_takes_its_share_of_a_ragged_batch():
    strategy = cases.mirrored(2)
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0], [7.0]] * 2)
    data = tf.data.Dataset.from_tensor_slices(rows).ragged_batch(4, drop_remainder=True)

    def step(tokens):
        context = tf.distribute.get_replica_context()
        count = tf.cast(tf.size(tokens.flat_values), tf.float32)
        return {"count": count, "sum": tf.reduce_sum(tokens), "replica": context.replica_id_in_sync_group}

    seen = []
    loops.Loop(step, data, strategy=strategy, actions=[seen.append]).run(2)
    # Means over the replicas: (1 + 2 and 3 + 1 tokens) and (1 + 2 + 3 and 4 + 5 + 6 + 7).
    assert [float(visit.outputs["count"][0]) for visit in seen] == [3.5, 3.5]
    assert [float(visit.outputs["sum"][0]) for visit in seen] == [14.0, 14.0]


@pytest.mark.slow
def test_a_step_that_makes_its_variables_is_traced_once_on_each_replica():
    strategy, traced = cases.mirrored(2), []

    def counting(y, prediction):
        traced.append(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return cases.squared_error(y, prediction)

    with strategy.scope():
        model, optimizer = models.one_layer("float16"), keras.optimizers.SGD(0.01, momentum=0.5)
        step = loops.TrainStep(model, counting, optimizer, loss_scaler=scaler.LossScaler(scaler.Static(8.0)))
    loop = loops.Loop(step, batches(4), strategy=strategy)
    loop.run(4)
    assert loop.counters.applied == 4
    assert len(traced) == 2
    assert cases.agree([*step.model.trainable_variables, *step.optimizer.variables, *step.masters.weights])


@pytest.fixture(scope="module")
def half():
    model, adam = functools.partial(models.stateful_model, "float16"), functools.partial(keras.optimizers.Adam, 0.01)
    return cases.Rig(cases.mirrored(2), model, adam, kind="float16", steps_per_call=4, accumulate=2)


@pytest.mark.slow
def test_a_window_that_was_spoiled_on_one_replica_names_its_gradient(half):
    half.reset()
    outputs = half.run([cases.spoil(cases.batch(1), "gradients", 1, 2), cases.batch(0)])
    last = len(half.model.trainable_variables) - 1
    assert (outputs["cause"].tolist(), outputs["variable"].tolist()) == ([0, scaler.Cause.OVERFLOW], [-1, last])
    name = half.model.trainable_variables[last].path
    assert f"that of {name!r} the last" in half.loss_scaler.explain()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gradients", "forward"])
def test_the_window_is_skipped_on_all_replicas(half, where):
    half.reset()
    before = cases.raw(half.moved())
    good, spoiled = cases.batch(0), cases.spoil(cases.batch(1), where, 1, 2)
    outputs = half.run([spoiled, good, good, spoiled])
    assert outputs["attempted"].tolist() == [False, True, False, True]
    assert not outputs["applied"].any()
    assert cases.raw(half.moved()) == before
    assert cases.finite(half.variables())
    assert half.run([good, good])["applied"].tolist() == [False, True]
    assert cases.agree([*half.weights(), *cases.shared(half.loss_scaler), *half.step.window._count.values])
    assert cases.finite(half.variables())


@pytest.mark.slow
def test_the_micro_batch_may_spoil_on_both_replicas_at_different_times(half):
    half.reset()
    before = cases.raw(half.moved())
    outputs = half.run([cases.spoil(cases.batch(replica), "gradients", replica, 2) for replica in (0, 1)])
    assert outputs["attempted"].tolist() == [False, True]
    assert cases.raw(half.moved()) == before


def descent(grads, variables):
    """A plain function, called once on each replica with that replica's gradients."""
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(0.1 * tf.convert_to_tensor(grad))


@pytest.mark.usefixtures("as_graphs")
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
