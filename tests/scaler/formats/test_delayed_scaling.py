"""Guards that delayed scaling moves as Transformer Engine's does, in training only, and that a skip takes it back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from format_cases import saturated
from models import batch, squared_error

import loops
import scaler
from scaler.formats import emulated

LARGEST = {"left": 448.0, "right": 448.0, "gradient": 57344.0}


def model_of(history=3, **arguments):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="dense", **arguments)])
    strategy = scaler.DelayedAmax(history_length=history, power_of_two=False, min_scale=2.0**-126, max_scale=2.0**126)
    return emulated("float8_e4m3fn", scaling=strategy)(model)


def state(model):
    paths = {variable.path: variable.numpy() for variable in model.non_trainable_variables}
    return {path.partition("product_")[2].replace("/", "_"): value for path, value in paths.items()}


def backward(model, inputs, upstream, training=True):
    with tf.GradientTape() as tape:
        outputs = model(inputs, training=training)
    return outputs, tape.gradient(outputs, model.trainable_variables, upstream)


def test_each_tensor_is_scaled_by_the_largest_of_past_steps():
    model, rng = model_of(), np.random.default_rng(0)
    kernel = model.layers[0].kernel.numpy()
    scales, seen = dict.fromkeys(LARGEST, np.float32(1)), {name: [] for name in LARGEST}
    for step in range(5):
        inputs, upstream = (
            (rng.standard_normal(shape) * 2.0 ** ((-1) ** step * 8)).astype(np.float32) for shape in ((8, 4), (8, 2))
        )
        tensors = {"left": inputs, "right": kernel, "gradient": upstream}
        x, w, dy = (
            saturated(tensors[name] * scales[name], "float8_e5m2" if name == "gradient" else "float8_e4m3fn")
            * (np.float32(1) / scales[name])
            for name in LARGEST
        )
        outputs, (of_kernel, _) = backward(model, inputs, upstream)
        np.testing.assert_allclose(outputs, x @ w, rtol=1e-5, atol=1e-5 * np.abs(x @ w).max())
        np.testing.assert_allclose(of_kernel, x.T @ dy, rtol=1e-5, atol=1e-5 * np.abs(x.T @ dy).max())
        for name, values in tensors.items():
            seen[name] = [*seen[name], np.abs(values).max()][-3:]
            scales[name] = np.float32(LARGEST[name]) / max(seen[name])
        found = state(model)
        assert {name: found[f"{name}_loss_scale"] for name in LARGEST} == scales
        assert all(found[f"{name}_history"].tolist()[-len(seen[name]) :] == seen[name] for name in LARGEST)


def test_only_training_moves_it_and_what_is_not_finite_is_not_remembered():
    model = model_of()
    first = state(model)
    inputs, upstream = tf.ones([8, 4]), tf.ones([8, 2])
    backward(model, inputs, upstream, training=False)
    model(inputs)
    assert all(np.array_equal(first[name], value) for name, value in state(model).items())
    backward(model, inputs, upstream)
    before = state(model)
    outputs, (of_kernel, _) = backward(model, inputs * [1, 1, 1, np.inf], upstream * [1, np.nan])
    assert not np.isfinite(outputs).all()
    assert not np.isfinite(of_kernel).all()
    after = state(model)
    for name in ("left", "gradient"):
        assert after[f"{name}_loss_scale"] == before[f"{name}_loss_scale"]
        assert np.array_equal(after[f"{name}_history"], before[f"{name}_history"])
    assert not np.array_equal(after["right_history"], before["right_history"])


@pytest.mark.slow
def test_a_backward_pass_that_is_a_function_of_its_own_moves_it_too():
    model = model_of()
    inner = tf.function(lambda inputs: model(inputs, training=True), jit_compile=True)

    @tf.function
    def outer(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(inputs) * 3.0)
        return tape.gradient(loss, model.trainable_variables)

    outer(tf.ones([8, 4]))
    assert state(model)["gradient_history"].tolist() == [0.0, 0.0, 3.0]


def test_a_skipped_step_puts_it_back_and_an_applied_one_moves_it():
    model = model_of()
    step = loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler(scaler.Dynamic())
    )
    run, (inputs, targets) = tf.function(step), batch()
    targets = tf.concat([targets, targets], axis=1)
    assert run((inputs, targets))["applied"]
    before = state(model)
    assert all(before[f"{name}_history"][-1] > 0 for name in LARGEST)
    assert not run((inputs * np.float32(np.inf), targets))["applied"]
    after = state(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert run((inputs, targets))["applied"]
    assert all(state(model)[f"{name}_history"][-2] > 0 for name in LARGEST)


def test_several_replicas_are_refused_and_current_scaling_is_for_them():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model, other = model_of(), keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    with pytest.raises(scaler.InvalidArgument, match="several replicas"):
        strategy.run(lambda: model(tf.ones([2, 4]), training=True))
    emulated("float8_e4m3fn", scaling="current")(other)
    found = strategy.run(lambda: other(tf.ones([2, 4]), training=True))
    one, two = strategy.experimental_local_results(found)
    assert np.array_equal(one, two)


def test_fit_trains_and_saved_weights_have_their_scales_or_not(tmp_path):
    model = model_of(bias_initializer="zeros")
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    inputs, targets = batch()
    model.fit(inputs, tf.concat([targets, targets], axis=1), verbose=0)
    assert state(model)["gradient_history"][-1] > 0
    place = tmp_path / "one.weights.h5"
    model.save_weights(place)
    other = model_of()
    other.load_weights(place)
    assert all(np.array_equal(state(model)[name], value) for name, value in state(other).items())
    plain = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="dense")])
    plain.load_weights(place)
    assert np.array_equal(plain.layers[0].kernel, model.layers[0].kernel)
    plain.save_weights(place)
    other.load_weights(place)
    assert state(other)["gradient_history"][-1] > 0
