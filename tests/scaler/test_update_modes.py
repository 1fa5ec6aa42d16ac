"""Guards 16-bit weights without masters: what a step does, against NumPy, and that a skip or a restore loses no bit."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import by_hand

import scaler
from scaler.weights.without_masters import round_stochastically

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MODES = {"kahan": scaler.weights.KahanWeights, "stochastic": scaler.weights.StochasticRounding}
RATE = 2.0**-12
SIZE = 40


def start(kind):
    return tf.Variable(np.linspace(1.0, 3.0, SIZE, dtype=np.float32).astype(KINDS[kind]), name="weight")


def gradient(step):
    return np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)


def make_step(weights, optimizer, loss_scaler):
    def step(grad):
        loss_scaler.scale(tf.constant(0.0))
        loss_scaler.apply(optimizer, [grad * loss_scaler.loss_scale], weights)

    return step


def kahan(weight, steps):
    """The published algorithm with SGD, in NumPy."""
    kind, c = weight.dtype, np.zeros_like(weight)
    for step in range(steps):
        moved = weight.astype(np.float32) - np.float32(RATE) * gradient(step)
        y = (moved - weight.astype(np.float32)) - c.astype(np.float32)
        new = (weight.astype(np.float32) + y).astype(kind)
        c = ((new.astype(np.float32) - weight.astype(np.float32)) - y).astype(kind)
        weight = new
    return weight, c


@pytest.mark.parametrize(("kind", "how"), [("bfloat16", "graph"), ("float16", "eager")])
def test_kahan_weights_are_those_of_numpy(kind, how):
    weight = start(kind)
    expected, compensation = kahan(weight.numpy(), 12)
    weights = scaler.weights.KahanWeights([weight])
    run_steps(make_step(weights, keras.optimizers.SGD(RATE), scaler.LossScaler(scaler.Static(8.0))), how, 12)
    assert weight.numpy().tobytes() == expected.tobytes()
    assert weights.compensations[0].numpy().tobytes() == compensation.tobytes()
    assert np.any(compensation != 0)


def run_steps(step, how, steps):
    grads = tf.constant(np.stack([gradient(number) for number in range(steps)]))
    call = step if how == "eager" else tf.function(step)
    for grad in grads:
        call(grad)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_stochastic_rounding_draws_by_seed_position_and_step(how):
    weight = start("bfloat16")
    expected = weight.numpy()
    for number in range(5):
        moved = expected.astype(np.float32) - np.float32(RATE) * gradient(number)
        seed = tf.constant([7, number + 1], tf.int64)
        expected = round_stochastically(moved, "bfloat16", seed).numpy()
    weights = scaler.weights.StochasticRounding([weight], seed=7)
    run_steps(make_step(weights, keras.optimizers.SGD(RATE), scaler.LossScaler(scaler.Static(8.0))), how, 5)
    assert weight.numpy().tobytes() == expected.tobytes()


def test_small_updates_add_up_where_rounding_to_nearest_loses_them():
    """By chance; sums that are compensated have the bits of NumPy, above."""
    weight = tf.Variable(tf.ones([1000], tf.bfloat16))
    weights = scaler.weights.StochasticRounding([weight])
    step = tf.function(make_step(weights, keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(8.0))))
    for _ in range(64):
        step(tf.fill([1000], -(2.0**-12)))
    # The spacing at 1 is 2^-7, and 64 updates of 2^-12 are two of it.
    assert abs(np.mean(weight.numpy().astype(np.float64)) - (1 + 2.0**-6)) < 0.002
    assert 0.5 < float(weights.swallowed) <= 1.0


def test_two_variables_and_two_steps_draw_different_numbers():
    first, second = (tf.Variable(tf.ones([1000], tf.bfloat16)) for _ in range(2))
    weights = scaler.weights.StochasticRounding([first, second])
    optimizer, loss_scaler = keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(1.0))
    seen = []
    for _ in range(2):
        first.assign(tf.ones_like(first))
        second.assign(tf.ones_like(second))
        loss_scaler.apply(optimizer, [tf.fill([1000], -(2.0**-8))] * 2, weights)
        seen += raw([first, second])
    assert len(set(seen)) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_leaves_every_bit(mode):
    weight, kept = start("bfloat16"), tf.Variable([1.0, 2.0])
    weights, optimizer = MODES[mode]([weight, kept]), keras.optimizers.Adam(RATE)
    loss_scaler = by_hand(scaler.Static(8.0))
    loss_scaler.apply(optimizer, [gradient(0), tf.ones([2])], weights)
    before = raw(weights.variables, optimizer.variables, [weight])
    outcome = loss_scaler.apply(optimizer, [gradient(1) * np.inf, tf.ones([2])], weights)
    assert not bool(outcome.finite)
    assert raw(weights.variables, optimizer.variables, [weight]) == before
    loss_scaler.apply(optimizer, [gradient(1), tf.ones([2])], weights)
    assert raw(weights.variables, optimizer.variables, [weight]) != before


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_run_goes_on_bit_for_bit(mode, tmp_path):
    def made():
        weight = start("bfloat16")
        weights, optimizer = MODES[mode]([weight]), keras.optimizers.Adam(RATE)
        optimizer.build(weights.weights)
        step = make_step(weights, optimizer, scaler.LossScaler(scaler.Static(8.0)))
        return weight, weights, optimizer, step

    weight, weights, optimizer, step = made()
    for number in range(3):
        step(gradient(number))
    saved = tf.train.Checkpoint(weight=weight, weights=weights, optimizer=optimizer).save(str(tmp_path / "saved"))
    for number in range(3, 6):
        step(gradient(number))
    other, others, another, go_on = made()
    tf.train.Checkpoint(weight=other, weights=others, optimizer=another).restore(saved).assert_consumed()
    for number in range(3, 6):
        go_on(gradient(number))
    assert raw(others.variables, another.variables, [other]) == raw(weights.variables, optimizer.variables, [weight])


@pytest.mark.parametrize("mode", MODES)
def test_values_assigned_to_the_model_are_taken_over(mode):
    weight = start("bfloat16")
    weights, optimizer = MODES[mode]([weight]), keras.optimizers.SGD(RATE)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    loss_scaler.apply(optimizer, [gradient(0)], weights)
    weight.assign(tf.fill([SIZE], tf.constant(2.0**-20, tf.bfloat16)))
    loss_scaler.apply(optimizer, [tf.zeros([SIZE])], weights)
    assert np.all(weight.numpy() == 2.0**-20)


def test_slots_are_float32_and_the_share_counts_updates_other_than_zero():
    weight = tf.Variable(tf.ones([4], tf.bfloat16))
    weights, optimizer = scaler.weights.KahanWeights([weight]), keras.optimizers.SGD(1.0, momentum=0.5)
    assert float(weights.swallowed) == 0.0
    scaler.LossScaler(scaler.Static(1.0)).apply(optimizer, [tf.constant([0.0, 2.0**-12, 0.5, 2.0**-11])], weights)
    assert float(weights.swallowed) == pytest.approx(2 / 3)
    assert {tf.as_dtype(v.dtype) for v in optimizer.variables if v.shape == (4,)} == {tf.float32}


def test_large_weights_are_rounded_once_a_step():
    large = [tf.Variable(tf.ones([2**19], tf.bfloat16)) for _ in range(2)]
    weights = scaler.weights.StochasticRounding(large)
    optimizer, loss_scaler = keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(1.0))
    step = tf.function(lambda grad: loss_scaler.apply(optimizer, [grad, grad], weights))
    step(tf.fill([2**19], -(2.0**-9)))
    for weight in large:
        assert np.mean(weight.numpy().astype(np.float64)) == pytest.approx(1 + 2.0**-9, abs=2.0**-14)
    assert float(weights.swallowed) == pytest.approx(0.75, abs=0.01)
    (steps,) = [variable for variable in weights.variables if variable.name.startswith("steps")]
    assert int(steps) == 1


@pytest.mark.parametrize("seed", [-1, 2**31, 1.5, True, None])
def test_other_seeds_are_named(seed):
    with pytest.raises(scaler.InvalidArgument, match="seed="):
        scaler.weights.StochasticRounding([start("float16")], seed=seed)
