"""Float64 variables, alone and among float32 ones and masters: unscaled, measured and moved in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import by_hand, modes, modes_with

import loops
import scaler

X = np.random.default_rng(0).normal(size=(8, 3))
Y = np.random.default_rng(1).normal(size=(8, 1))


def kernel(x, inner):
    """A float64 model around a float16 network, as a Gaussian process with learned features is."""
    features = tf.cast(tf.nn.tanh(tf.matmul(tf.cast(x, inner.dtype), inner)), tf.float64)
    return tf.reduce_sum(features, 1, keepdims=True)


def weights(inner=None):
    outer = tf.Variable([0.1, 0.7, 1.3], dtype=tf.float64, name="outer")
    return [outer, *([tf.Variable(X[:3, :2], dtype=inner, name="inner")] if inner else [])]


def loss_of(own):
    found = tf.reduce_sum(tf.constant(X) * own[0], 1, keepdims=True)
    if len(own) > 1:
        found += kernel(tf.constant(X), own[1])
    return tf.reduce_mean((found - Y) ** 2)


def scaled_steps(execute, own, optimizer, loss_scaler, *, variables=None, **arguments):
    @execute
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(loss_of(own))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, own), variables or own, **arguments).finite

    return [bool(step()) for _ in range(5)]


def plain_steps(execute, own, optimizer):
    @execute
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(own)
        optimizer.apply(tape.gradient(loss, own), own)
        return loss

    for _ in range(5):
        step()


@pytest.mark.slow_with("graph-inner2")
@modes_with(("inner",), eager=[(None,), (tf.float32,)], graph=[(tf.float64,)])
def test_training_is_that_without_scaling_bit_for_bit(execute, inner):
    found = []
    for scales in (True, False):
        own, optimizer = weights(inner), keras.optimizers.Adam(0.1)
        if scales:
            loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**12, growth_interval=2))
            assert all(scaled_steps(execute, own, optimizer, loss_scaler))
        else:
            # What is compared with a tolerance needs no trace.
            plain_steps((lambda step: step) if inner == tf.float32 else execute, own, optimizer)
        found.append(own)
    if inner == tf.float32:  # Sums may be regrouped.
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6 if one.dtype == tf.float32 else 1e-13)
    else:
        assert raw(found[0]) == raw(found[1])


@modes("graph")
def test_float64_float32_and_masters_in_one_list(execute):
    own = [*weights(tf.float16), tf.Variable([1.0])]
    masters, optimizer = scaler.MasterWeights(own), keras.optimizers.SGD(0.5)
    loss_scaler, given = by_hand(scaler.Static(4.0)), []
    step = execute(lambda *grads: loss_scaler.apply(optimizer, list(grads), masters)[:3])
    assert [variable.dtype for variable in masters.weights] == [tf.float64, tf.float32, tf.float32]
    tiny = 2.0**-40
    grads = [tf.constant([4.0 + tiny, 0.0, 0.0], tf.float64), tf.ones([3, 2], tf.float16), tf.constant([8.0])]
    finite, _, norm = step(*grads)
    assert finite
    assert float(norm) == pytest.approx((1 + 6 / 16 + 4) ** 0.5)
    assert own[0].numpy()[0] == 0.1 - 0.5 * (1.0 + tiny / 4)
    before = raw(own, masters.weights, optimizer.variables, given)
    for place, value in ((0, np.inf), (1, np.nan), (2, np.inf)):
        bad = [grad * (value if place == at else 1.0) for at, grad in enumerate(grads)]
        assert not step(*bad)[0]
        assert raw(own, masters.weights, optimizer.variables, given) == before


@modes("eager")
def test_finite_means_finite_squares_in_the_dtype_of_each_gradient(execute):
    own = [tf.Variable([0.0], dtype=tf.float64), tf.Variable([0.0])]
    loss_scaler = by_hand(scaler.Static(1.0))
    step = execute(lambda *grads: loss_scaler.apply(keras_less, list(grads), own))
    wide = step(tf.constant([1e100], tf.float64), tf.constant([1.0]))
    assert wide.finite
    assert np.isinf(wide.grad_norm)  # Float32 cannot hold it.
    assert step(tf.constant([1e20], tf.float64), tf.constant([1.0])).grad_norm == np.float32(1e20)
    for bad in ((1e200, 1.0), (1.0, 1e20)):
        assert not step(tf.constant([bad[0]], tf.float64), tf.constant([bad[1]])).finite
    assert scaler.all_finite([tf.constant([1e100], tf.float64)])
    assert not scaler.all_finite([tf.constant([1e100], tf.float64), tf.constant([1e20])])


def keras_less(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        assert grad.dtype == variable.dtype
        variable.assign(grad)


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32"), ("float64", "float16")])
def test_a_gradient_of_another_dtype_becomes_the_variables(dtypes):
    loss_scaler, variable = by_hand(scaler.Static(2.0)), tf.Variable([0.0], dtype=dtypes[0])
    assert loss_scaler.apply(keras_less, [tf.constant([3.0], dtypes[1])], [variable]).finite
    assert variable.numpy().tolist() == [1.5]


@pytest.mark.parametrize(
    ("clip", "wanted"),
    [
        ({"clip_norm": 0.1}, lambda g, h: g * (0.1 / np.sqrt(np.sum(g**2) + np.sum(h**2)))),
        ({"clip": scaler.ClipByNorm(0.1)}, lambda g, h: g * (0.1 / np.sqrt(np.sum(g**2)))),
        ({"clip": scaler.ClipByValue(0.1)}, lambda g, h: np.clip(g, -0.1, 0.1)),
    ],
)
def test_clipping_is_in_float64(clip, wanted):
    grads = np.array([0.3, -0.7]), np.array([0.5])
    own = [tf.Variable(np.zeros_like(grads[0])), tf.Variable(np.float32([0.0]))]
    outcome = by_hand(scaler.Static(1.0)).apply(keras_less, [tf.constant(g) for g in grads], own, **clip)
    np.testing.assert_allclose(own[0].numpy(), wanted(*grads), rtol=1e-15)
    given = [own[0].numpy(), own[1].numpy()]
    assert float(outcome.clipped_norm) == pytest.approx(np.sqrt(sum(np.sum(one**2) for one in given)), rel=1e-6)


@modes("eager")
def test_a_guard_clips_each_to_its_limit_in_float64(execute):
    """Also one with a norm that float32 cannot hold: its limit divided by infinity would be 0."""
    slopes = np.array([3.0, -4.0])
    own = [tf.Variable(np.zeros(2), name="wide"), tf.Variable(np.zeros(2), dtype=tf.float32, name="other")]
    guard = scaler.SpikeGuard(scaler.Static(4.0), window=7, norm=False, loss=False, by_tensor="clip")
    loss_scaler = scaler.LossScaler(guard)

    @execute
    def step(times):
        with tf.GradientTape() as tape:
            line = tf.reduce_sum(own[0] * slopes * times)
            scaled = loss_scaler.scale(line + tf.cast(tf.reduce_sum(own[1]), tf.float64))
        return loss_scaler.apply(keras_less, tape.gradient(scaled, own), own)

    for _ in range(7):
        assert int(step(np.float64(1.0)).clipped_tensors) == 0
    for times in (2.5, 1e10, 1e45, 1e100):
        outcome = step(np.float64(times))
        assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, int(times > 3))
        # A norm of 5 in each step: the limit is three times that.
        np.testing.assert_allclose(own[0], slopes * min(times, 3.0), rtol=1e-6)
        np.testing.assert_allclose(own[1], [1.0, 1.0])
        assert float(outcome.clipped_norm) == pytest.approx(np.hypot(5 * min(times, 3.0), np.sqrt(2.0)), rel=1e-6)


def test_repeated_ids_are_summed_in_float64():
    table, tiny = tf.Variable(np.zeros((3, 1))), 2.0**-40
    grad = tf.IndexedSlices(tf.constant([[1.0], [tiny]], tf.float64), tf.constant([1, 1]), tf.constant([3, 1]))
    loss_scaler = by_hand(scaler.Static(1.0))
    assert loss_scaler.apply(keras.optimizers.SGD(1.0), [grad], [table]).finite
    assert table.numpy()[1] == -(1.0 + tiny)
    assert loss_scaler.unscale([grad])[0].values.dtype == tf.float64


def test_statistics_take_what_float32_cannot_hold_as_its_largest_value():
    values = tf.constant([1e300, -2.0], tf.float64)
    assert scaler.gradients.amax([values]) == np.finfo(np.float32).max
    assert scaler.gradients.amax([values * np.inf]) == np.inf
    assert scaler.gradients.histogram([values], (1.0, 4.0)).numpy().tolist() == [0, 1, 1]
    own, loss_scaler = weights(tf.float16), scaler.LossScaler(scaler.strategies.DelayedAmax())
    masters = scaler.MasterWeights(own)
    assert all(scaled_steps(lambda step: step, own, keras.optimizers.SGD(0.1), loss_scaler, variables=masters))


def test_a_second_look_works():
    own, loss_scaler = weights(), scaler.LossScaler(scaler.Static(2.0**100))
    with tf.GradientTape(persistent=True) as tape:
        half = tf.cast(own[0], tf.float16)
        scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(half * half, tf.float64)))
    grads = tape.gradient(scaled, own)
    outcome = loss_scaler.apply(
        keras_less, grads, own, diagnose=lambda small: tape.gradient(scaled, own, output_gradients=small)
    )
    assert not outcome.finite
    assert outcome.lower_helps


def model(dtype="float64"):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3], dtype=dtype), keras.layers.Dense(2, dtype=dtype), keras.layers.Dense(1)])


def test_a_bad_micro_batch_skips_its_window_in_fit():
    fitted = model()
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    fitted.compile(scaler.LossScaleOptimizer(inner, scaler.Static(64.0)), loss="mse", run_eagerly=True)
    before = raw(fitted.weights)
    for x in (X * np.nan, X):
        fitted.train_on_batch(x, Y)
    assert raw(fitted.weights) == before


def test_layerwise_gradients_keep_their_dtype():
    plain, built = model(), model()
    functional = keras.Model(built.inputs[0], built.outputs[0])
    cut, layerwise = scaler.layerwise.insert_rescales(functional, after=[functional.layers[1].name])
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    for _ in range(3):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_mean(tf.square(cut(X) - Y)))
        grads, seen = layerwise.gradient(tape, scaled, cut.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(plain(X) - Y))
        wanted = tape.gradient(loss, plain.trainable_variables)
        layerwise.update(seen)
    assert [grad.dtype.name for grad in grads] == ["float64"] * 2 + ["float32"] * 2
    assert raw(grads) == raw(wanted)


def test_probes_leave_out_what_the_bins_do_not_hold():
    made = model()
    watch = scaler.observe.watch(made, kinds=scaler.observe.KINDS)
    step = loops.TrainStep(
        made,
        keras.losses.MeanSquaredError(),
        keras.optimizers.Adam(0.1),
        loss_scaler=by_hand(scaler.Static(64.0)),
        probes=watch,
    )
    with pytest.warns(UserWarning, match="float64 has exponents outside of the bins") as told:
        outputs = step((X, Y))
    first, second = (layer.name for layer in made.layers)
    assert sum("float64 has exponents" in str(one.message) for one in told) == 1
    assert watch.left_out == [f"{first}/kernel", f"{first}/bias"]
    assert not [name for name in watch.names if f"/{first}/" in name or name.endswith(f"/{first}")]
    assert f"weights/{second}/kernel" in watch.names
    assert outputs["amax"].shape == [len(watch.names)]
