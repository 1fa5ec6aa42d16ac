"""Guards what one gradient far beyond its own last norms does to a step: skipped and told by name, or clipped alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import take
from tensor_cases import SPIKE, guarded, shared, warmed

import scaler
from scaler import Cause, Dynamic, SpikeGuard

WAYS = {"eager": (lambda step: step, None), "graph": (tf.function, None)}


def in_way(by_tensor, way):
    execute, select = WAYS[way]
    return warmed(by_tensor, execute, select=select) if way == "eager" else shared(by_tensor, select)


@pytest.mark.slow_with("eager")
@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_gradient_beyond_its_own_limit_skips_the_step_and_is_named(way):
    lines = in_way("skip", way)
    before, scale = lines.moved(), float(lines.loss_scaler.loss_scale)
    outcome = lines.step(SPIKE)
    assert (bool(outcome.finite), Cause(int(outcome.cause))) == (False, Cause.SPIKE)
    seen = [float(outcome.value), float(outcome.usual), float(outcome.limit)]
    np.testing.assert_allclose(seen, np.sqrt(2.0) * np.array([40.0, 0.5, 1.5]), rtol=1e-5)
    assert (int(outcome.variable), int(outcome.count), int(outcome.clipped_tensors)) == (0, 1, 0)
    assert lines.moved() == before
    assert float(lines.loss_scaler.loss_scale) == scale
    said = lines.loss_scaler.explain(outcome)
    assert "because the norm of the gradient of 'small" in said
    assert "is 56.5685, above the limit of 2.12132 that SpikeGuard draws from a median of 0.707107" in said
    assert lines.loss_scaler.explain() == said
    assert bool(lines.step().finite)
    assert lines.moved() != before


@pytest.mark.slow_with("eager")
@pytest.mark.parametrize("way", WAYS)
def test_or_it_alone_is_clipped_and_the_step_counts(way):
    lines, plain = in_way("clip", way), shared(None, execute=WAYS["eager"][0])
    assert lines.moved() == plain.moved()
    outcome = lines.step(SPIKE)
    assert (bool(outcome.finite), int(outcome.cause), int(outcome.clipped_tensors)) == (True, 0, 1)
    # The median of 0.5, a tenth of it twenty times above it: as if the slope were 1.5.
    plain.step((1.5, 80.0))
    for ours, theirs in zip(lines.masters.weights, plain.masters.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(outcome.grad_norm, np.hypot(np.sqrt(2.0) * 40.0, 80.0), rtol=1e-6)
    np.testing.assert_allclose(outcome.clipped_norm, np.hypot(np.sqrt(2.0) * 1.5, 80.0), rtol=1e-6)
    assert int(lines.step().clipped_tensors) == 0
    assert int(lines.loss_scaler.state.spikes) == 0


def test_where_every_gradient_jumps_the_guard_clips_each_and_the_global_norm_is_that_afterwards():
    lines = shared("clip")
    outcome = lines.step((50.0, 8000.0))
    # Each comes down to three times its median, and so does the global norm, which is at its own limit then.
    assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, 2)
    np.testing.assert_allclose(outcome.clipped_norm, 3 * np.hypot(np.sqrt(2.0) * 0.5, 80.0), rtol=1e-6)


def test_gradients_that_jump_alike_are_clipped_whatever_their_last_bits():
    weights = [tf.Variable(tf.ones([size]), name=f"w{size}") for size in (3, 4, 5, 6, 7)]
    guard = SpikeGuard(Dynamic(2.0**10), window=10, loss=False, by_tensor="clip")
    # What a step selects is traced in half the time of what it branches to.
    loss_scaler, optimizer = scaler.LossScaler(guard, select=True), keras.optimizers.SGD(0.0)
    optimizer.build(weights)

    @tf.function
    def step(slope):
        grads = [tf.fill(weight.shape, (place + 1.0) * slope) for place, weight in enumerate(weights)]
        return loss_scaler.apply(optimizer, grads, weights, unscaled=True)

    rng = np.random.default_rng(0)
    for _ in range(8):
        step(tf.constant(1.0 + 0.01 * rng.normal(), tf.float32))
    known = [np.asarray(variable) for variable in loss_scaler.variables]
    for jump in range(500, 512):
        for variable, value in zip(loss_scaler.variables, known, strict=True):
            variable.assign(value)
        outcome = step(tf.constant(jump, tf.float32))
        assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, 5)


def test_limits_that_are_too_large_together_make_a_spike_whose_sentence_says_what_was_judged():
    """Each step has two of three gradients, so that the limits of all three are more than that of the global norm."""
    loss_scaler = scaler.LossScaler(SpikeGuard(Dynamic(2.0**10), window=3, loss=False, by_tensor="clip"))
    weights = [tf.Variable([1.0], name=name) for name in "abc"]

    def step(*grads):
        grads = [tf.constant([grad]) for grad in grads]
        return loss_scaler.apply(scaler.move_nothing, grads, weights, unscaled=True)

    for left_out in range(3):
        assert bool(step(*(10.0 * (place != left_out) for place in range(3))).finite)
    outcome = step(1000.0, 1000.0, 1000.0)
    assert Cause(int(outcome.cause)) is Cause.SPIKE
    np.testing.assert_allclose([outcome.value, outcome.limit], np.sqrt([3 * 30.0**2, 9 * 200.0]), rtol=1e-6)
    assert "the global norm of its gradients, each clipped to its own limit, is 51.9615" in loss_scaler.explain()


def test_several_beyond_their_limits_are_counted():
    lines = shared("skip")
    lines.step((40.0, 8000.0))
    assert int(lines.loss_scaler.last_skip.count) == 2
    assert "the norm of the gradient of 'large" in lines.loss_scaler.explain()
    assert "in the last steps, and 1 other is beyond its" in lines.loss_scaler.explain()


@pytest.mark.slow
def test_what_you_clip_by_comes_after_it():
    eager, clip = WAYS["eager"][0], scaler.ClipByValue(0.25)
    lines, plain = warmed("clip", eager, clip=clip), warmed(None, eager, clip=clip)
    outcome = lines.step(SPIKE)
    plain.step((1.5, 80.0))
    np.testing.assert_allclose(outcome.clipped_norm, np.sqrt(3 * 0.25**2), rtol=1e-6)
    for ours, theirs in zip(lines.masters.weights, plain.masters.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_more_in_a_row_than_the_share_is_stuck():
    lines = shared("skip")
    for _ in range(3):
        lines.step(SPIKE)
    with pytest.raises(scaler.StuckError, match=r"3 steps in a row were skipped as spikes, and 2 are allowed.*'small"):
        lines.loss_scaler.check()


@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_an_overflow_is_none_and_no_window_takes_it(by_tensor):
    lines = shared(by_tensor)
    before = raw([lines.loss_scaler.state.tensor_norms])
    outcome = lines.step((1e6, 80.0))
    assert Cause(int(outcome.cause)) == Cause.OVERFLOW
    assert int(outcome.clipped_tensors) == 0
    assert raw([lines.loss_scaler.state.tensor_norms]) == before
    assert float(lines.loss_scaler.loss_scale) < float(outcome.loss_scale)


@pytest.mark.slow
def test_windows_of_micro_batches_are_judged_whole():
    """`when` is False for the first of two, which neither enters a window nor is clipped."""
    weight, optimizer = tf.Variable([0.0]), keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(guarded("clip"), select=False)

    @tf.function
    def step(grad, when):
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(weight) * grad, [weight], when=when)

    def window(grad):
        one = step(tf.constant(1e4), tf.constant(False))
        assert (bool(one.finite), int(one.cause), int(one.clipped_tensors), float(one.value)) == (False, 0, 0, 0.0)
        return step(tf.constant(grad), tf.constant(True))

    assert all(bool(window(1.0).finite) for _ in range(5))
    assert loss_scaler.state.tensor_norms[:, 0].numpy().tolist() == [1.0] * 5
    outcome = window(50.0)
    assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, 1)
    assert float(outcome.clipped_norm) == 3.0


@pytest.mark.slow_with("clip")
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_many_small_gradients_have_norms_of_their_own(by_tensor):
    """Without the guard they are measured together, and moved together."""
    weights, optimizer = [tf.Variable(tf.ones([3]), name=f"w{at}") for at in range(5)], keras.optimizers.SGD(0.5)
    optimizer.build(weights)
    loss_scaler = scaler.LossScaler(guarded(by_tensor))

    @tf.function
    def take(slopes):
        grads = [tf.fill([3], slopes[at]) for at in range(5)]
        return loss_scaler.apply(optimizer, grads, weights, unscaled=True)

    usual = np.float32([1, 2, 3, 5, 1000])
    for _ in range(5):
        assert bool(take(usual).finite)
    np.testing.assert_allclose(loss_scaler.state.tensor_usual, np.sqrt(3.0) * usual, rtol=1e-6)
    outcome = take(np.where(usual == 5, np.float32(50), usual))
    if by_tensor == "skip":
        assert (Cause(int(outcome.cause)), int(outcome.variable), int(outcome.count)) == (Cause.SPIKE, 3, 1)
    else:
        clipped = np.where(usual == 5, 15, usual)
        np.testing.assert_allclose(outcome.clipped_norm, np.sqrt(3.0) * np.linalg.norm(clipped), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execute", "select"), [(lambda step: step, False), (tf.function, True)], ids=["eager", "graph"]
)
def test_an_overflow_is_retried_and_the_gradient_of_the_rest_is_clipped(execute, select):
    weight, optimizer = tf.Variable([0.0, 0.0]), keras.optimizers.SGD(2.0**-20)
    optimizer.build([weight])
    guard = SpikeGuard(Dynamic(2.0**15), window=5, loss=False, by_tensor="clip")
    loss_scaler = scaler.LossScaler(guard, select=select)

    @execute
    def take(slope):
        with tf.GradientTape(persistent=True) as tape:
            line = tf.cast(tf.cast(weight, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
            scaled = loss_scaler.scale(tf.reduce_sum(line))

        def again(small):
            return tape.gradient(scaled, [weight], output_gradients=small)

        return loss_scaler.apply(optimizer, None, [weight], again=again)

    outcomes = [take(tf.constant(slope)) for slope in (3.0, 3.0, 3.0, 3.0, 3.0, 3000.0)]
    assert all(bool(one.finite) for one in outcomes)
    assert [int(one.retries) for one in outcomes] == [1, 0, 0, 0, 0, 10]
    assert [int(one.clipped_tensors) for one in outcomes] == [0] * 5 + [1]
    np.testing.assert_allclose(outcomes[5].clipped_norm, 9 * np.sqrt(2.0), rtol=1e-5)


@pytest.mark.slow
def test_adagrad_which_is_looked_at_keeps_its_promise():
    lines = warmed("skip", optimizer=keras.optimizers.Adagrad(0.1))
    before = lines.moved()
    assert Cause(int(lines.step(SPIKE).cause)) is Cause.SPIKE
    assert lines.moved() == before
