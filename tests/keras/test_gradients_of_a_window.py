"""Guards a window of `gradient_accumulation_steps`: it drops no gradient, unscales each micro-batch by its own scale,
names what spoiled it, and is judged by the mean of its losses.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes

import scaler


def window(strategy, *variables):
    """The variables' optimizer, for windows of two micro-batches."""
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), strategy)
    optimizer.build(list(variables))
    return optimizer


@pytest.fixture
def two():
    """Two variables, their optimizer, and a function that takes a micro-batch of those named."""
    variables = {name: keras.Variable(np.zeros(2, np.float32), name=name) for name in "ab"}
    optimizer = window(scaler.Static(8.0), *variables.values())

    def micro_batch(names):
        weights = [variable.value for variable in variables.values()]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name].value) for name in names])
            scaled = optimizer.scale_loss(loss)
        return optimizer.apply(tape.gradient(scaled, weights), list(variables.values())).finite

    return variables, optimizer, micro_batch


def values(variables):
    return [variable.numpy().tolist() for variable in variables.values()]


@pytest.mark.parametrize(
    ("names", "said", "compiled"),
    [
        (("a", "b"), "'a' has no gradient in this micro-batch", False),
        (("a", "ab"), "'b' has a gradient in this micro-batch", False),
        (("ab", "a"), "'b' has no gradient in this micro-batch", False),
        (("ab", "a"), "'b' has no gradient in this micro-batch", True),
    ],
    ids=["another", "more", "fewer", "fewer in a graph"],
)
def test_no_gradient_of_a_window_is_dropped(two, names, said, compiled):
    variables, _, micro_batch = two
    run = tf.function(micro_batch) if compiled else micro_batch
    run(names[0])
    with pytest.raises(scaler.InvalidArgument, match=said):
        run(names[1])
    assert values(variables) == [[0.0, 0.0], [0.0, 0.0]]
    assert run(names[0])
    assert values(variables) == [[-1.0, -1.0] if name in names[0] else [0.0, 0.0] for name in "ab"]


def test_a_part_of_the_variables_may_be_applied_and_not_another_part_in_its_window(two):
    variables, optimizer, _ = two
    grad = tf.constant([8.0, 8.0])
    with tf.GradientTape():
        optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply([grad], [variables["a"]])
    with pytest.raises(scaler.InvalidArgument, match="'a' has no gradient in this micro-batch"):
        optimizer.apply([grad], [variables["b"]])
    optimizer.apply([grad], [variables["a"]])
    assert values(variables) == [[-1.0, -1.0], [0.0, 0.0]]


ALL = ["first", "middle", "last"]


@modes("eager", "graph")
def test_a_spoiled_window_names_what_was_not_finite(execute):
    weights = [tf.Variable(1.0, name=name) for name in ALL]
    optimizer = window(scaler.Dynamic(8.0), *weights)

    def micro_batch(factors):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.stack(weights) * factors))
        return optimizer.apply(tape.gradient(scaled, weights), weights).finite

    run, good = execute(micro_batch), np.ones(3, np.float32)
    for guilty, bad_at in itertools.product((["last"], ["middle"], ["middle", "last"], ALL), range(2)):
        bad = np.float32([np.inf if name in guilty else 1.0 for name in ALL])
        before = weights[0].numpy()
        assert not [run(bad if number == bad_at else good) for number in range(2)][-1]
        last = optimizer.loss_scaler.last_skip
        first, nearest = ALL.index(guilty[0]), ALL.index(guilty[-1])
        assert (int(last.index), int(last.count), int(last.nearest)) == (first, len(guilty), nearest)
        assert f"the gradient of '{guilty[0]}" in optimizer.loss_scaler.explain()
        assert [run(good) for _ in range(2)][-1]
        assert all(np.isfinite(variable.numpy()) for variable in [*weights, *optimizer.inner_optimizer.variables])
        assert weights[0].numpy() == before - 1.0


def moving(strategy):
    """A weight, its optimizer, and a micro-batch whose true gradient is given."""
    weight = keras.Variable(np.zeros(2, np.float32))
    optimizer = window(strategy, weight)

    def micro_batch(slope, unscale=False):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(weight.value) * slope)
        grads = tape.gradient(scaled, [weight.value])
        return optimizer.apply(optimizer.get_unscaled_gradients(grads) if unscale else grads, [weight]).finite

    return weight, optimizer, micro_batch


@pytest.mark.slow_with("xla")
@modes("graph", "xla")
def test_an_update_in_the_middle(execute):
    weight, optimizer, micro_batch = moving(scaler.Dynamic(16.0, growth_interval=1))
    run = execute(micro_batch)
    for number, finite in enumerate([True, False, False, True], 1):
        run(np.float32(1.0))
        optimizer.loss_scaler.update(scaler.Event(tf.constant(finite)))
        assert run(np.float32(3.0))
        np.testing.assert_array_equal(weight.numpy(), [-2.0 * number] * 2)


def test_one_micro_batch_unscaled_by_hand_and_one_scaled():
    weight, _, micro_batch = moving(scaler.Dynamic(16.0, growth_interval=1))
    micro_batch(1.0)
    assert micro_batch(3.0, unscale=True)
    np.testing.assert_array_equal(weight.numpy(), [-2.0] * 2)
    micro_batch(1.0, unscale=True)
    assert micro_batch(3.0)
    np.testing.assert_array_equal(weight.numpy(), [-4.0] * 2)


@pytest.mark.parametrize("scales", [(2.0**-126, 2.0**126), (2.0**126, 2.0**-126)], ids=["up", "down"])
def test_a_scale_that_moves_beyond_float32_spoils_the_window(scales):
    scale = tf.Variable(scales[0])
    weight, optimizer, micro_batch = moving(scaler.Dynamic(1.0, min_scale=scale, max_scale=scale))
    micro_batch(1.0)
    scale.assign(scales[1])
    assert not micro_batch(1e-3)
    assert np.isfinite([value for variable in optimizer._window._sums for value in variable.numpy()]).all()
    scale.assign(1.0)
    micro_batch(1.0)
    assert micro_batch(3.0)
    np.testing.assert_array_equal(weight.numpy(), [-2.0] * 2)


def test_the_loss_that_is_judged_is_the_mean_of_a_window_and_the_next_begins_anew():
    """`SpikeGuard` under `fit`, which hands it the loss that the targets say."""
    usual, spike, after = [1.0, 3.0] * 4, [90.0, 110.0], [2.0, 4.0]
    guard = scaler.SpikeGuard(scaler.Static(8.0), window=4, norm=False, loss=True)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    optimizer = window(guard, *model.trainable_variables)

    def loss(y, prediction):
        own = tf.reduce_mean(prediction)
        return tf.reduce_mean(y) + own - tf.stop_gradient(own)

    model.compile(optimizer, loss, run_eagerly=True)
    y = np.float32([[value] for value in usual + spike + after])
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    last, counters = optimizer.loss_scaler.last_skip, optimizer.loss_scaler.counters
    assert (float(last.value), float(last.usual), float(last.limit)) == (100.0, 2.0, pytest.approx(6.0))
    assert (int(counters.applied), int(counters.skipped)) == (5, 1)
    np.testing.assert_allclose(optimizer.loss_scaler.state.losses[-1], 3.0)
