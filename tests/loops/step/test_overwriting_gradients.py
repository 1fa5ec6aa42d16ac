"""Guards variables whose gradient is their new value, as of Keras's float8 layers: nothing adds or divides it.

Of several in one step the largest counts, of micro-batches as of losses.
"""

import math

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from loop_cases import static
from rigs import Rig, raw
from step_cases import part

import loops
import scaler
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.lint.graph_rules import lost_share

KINDS = ["weight_gradients", "weights", "updates", "slots", "update_rms", "noise_scale"]
NEW_VALUES = ("scale", "history")
LARGEST = 3.0
ERROR = keras.losses.MeanSquaredError()


def quantized():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="first")])
    model.get_layer("first").quantize("float8")
    return model


def history(model):
    return float(np.max(model.get_layer("first").inputs_amax_history))


def data(largest=LARGEST):
    x = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    x[:, 0] = largest
    return tf.constant(x), tf.zeros([8, 2])


def test_the_largest_gradient_of_an_output_counts_of_several_losses():
    model, (x, y), factors = quantized(), data(), {"large": 64.0, "small": 1.0}
    losses = scaler.PerLoss({name: scaler.Static(8.0) for name in factors})
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            error = tf.reduce_sum(tf.square(model(x, training=True) - y))
            scaled = losses.scale({name: factor * error for name, factor in factors.items()})
        grads = {name: tape.gradient(loss, model.trainable_variables) for name, loss in scaled.items()}
        return losses.apply(optimizer, grads, model.trainable_variables).finite, grads["large"]

    place = [one.name for one in model.trainable_variables].index("outputs_grad_amax_history")
    finite, large = step()
    assert finite
    np.testing.assert_array_equal(model.trainable_variables[place], large[place])
    assert history(model) == LARGEST


@hypothesis.given(data=st.data(), parts=st.integers(1, 4))
def test_the_largest_of_new_values(data, parts):
    values = data.draw(
        st.lists(
            st.lists(st.floats(width=32, allow_subnormal=False), min_size=3, max_size=3), min_size=parts, max_size=parts
        )
    )
    found = scaler.gradients.largest(tf.constant(values, tf.float32)).numpy()
    for one, column in zip(found, zip(*values, strict=True), strict=True):
        finite = all(map(math.isfinite, column))
        assert float(one) == max(column) if finite else not math.isfinite(one)


def test_a_group_of_layers_does_not_divide_it():
    model = quantized()
    layerwise = scaler.layerwise.Layerwise({"all": model.trainable_variables}, strategy=scaler.Static(1024.0))
    grads = [tf.fill(variable.shape, LARGEST) for variable in model.trainable_variables]
    for variable, found in zip(
        model.trainable_variables, layerwise.unscale(grads, model.trainable_variables), strict=True
    ):
        expected = LARGEST if variable.overwrite_with_gradient else LARGEST / 1024.0
        assert np.all(np.asarray(found) == np.float32(expected))


@pytest.fixture(scope="module")
def in_windows():
    """A step of windows of two with an average and probes, traced once. Whoever takes it sets it back."""
    model, optimizer = quantized(), keras.optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5)
    watch = scaler.observe.watch(model, kinds=KINDS)
    return Rig(model, optimizer, ERROR, data(), loss_scaler=static(8.0), probes=watch, accumulate=2)


def test_the_average_of_a_float8_model_has_the_scales_that_it_trains_with(in_windows):
    """And of the micro-batches of a window the largest input counts."""
    in_windows.reset()
    model, optimizer, take = in_windows.step.model, in_windows.step.optimizer, in_windows.call
    for largest in (LARGEST, LARGEST / 2) * 2:
        take(data(largest))
    assert history(model) == LARGEST
    averaged, own = loops.Averaged(model, optimizer), raw(model.variables)
    predicted = averaged(data()[0]).numpy()
    with averaged.swapped():
        kept = [one == other for one, other in zip(raw(model.trainable_variables), own, strict=False)]
        assert kept == [variable.overwrite_with_gradient for variable in model.trainable_variables]
        np.testing.assert_allclose(model(data()[0]), predicted, rtol=1e-6)
    assert raw(model.variables) == own


def test_a_teacher_has_the_scales_of_its_student():
    student, teacher = quantized(), quantized()
    teacher.set_weights(student.get_weights())
    own = part("student", student, scale=8.0, teacher=teacher, momentum=0.75)
    step = tf.function(loops.ComposedStep([own]))
    for largest in (LARGEST, LARGEST / 2):
        assert step(data(largest))["applied"]
    same = [one == other for one, other in zip(raw(teacher.weights), raw(student.weights), strict=True)]
    assert same == [getattr(variable, "overwrite_with_gradient", False) for variable in student.weights]
    assert history(teacher) == LARGEST


def test_probes_leave_new_values_out(in_windows):
    """The micro-batches are alike, so that their gradients have no noise."""
    in_windows.reset()
    watch = in_windows.step.probes
    for _ in range(2):
        outputs = in_windows.call(data())
    assert outputs["applied"]
    assert len(watch.names) == 2 * 3 + 2 * 2
    assert not [name for name in watch.names if name.endswith(NEW_VALUES)]
    gradients = [name.startswith("weight_gradients/") for name in watch.names]
    largest = np.max(outputs["amax"].numpy()[gradients])
    norm = float(outputs["grad_norm"])
    assert largest <= 8.0 * norm
    noise, signal = outputs["noise_scale"].numpy()
    np.testing.assert_allclose([noise, signal], [0.0, norm**2], atol=1e-4 * norm**2)


def test_a_group_of_layers_does_not_count_it():
    weight, own = keras.Variable(tf.ones([2]), name="weight"), keras.Variable(tf.zeros([3]), name="own")
    own.overwrite_with_gradient = True
    layerwise = scaler.layerwise.Layerwise({"all": [weight, own]}, strategy=scaler.Static(1024.0))

    @tf.custom_gradient
    def noting(x, known):
        return x, lambda upstream: (upstream, tf.fill(known.shape, 1e6))

    with tf.GradientTape() as tape:
        y = layerwise.rescale(noting(weight * [1.0, 2.0], tf.convert_to_tensor(own)), "all")
        loss = tf.reduce_sum(y)
    (grad, new), event = layerwise.gradient(tape, loss, [weight, own])
    np.testing.assert_array_equal(grad, [1.0, 2.0])
    np.testing.assert_array_equal(new, [1e6] * 3)
    assert float(event.amax[0]) == 2.0


def test_what_looks_at_a_step_counts_none_of_them():
    variables = [keras.Variable(tf.ones([2])), keras.Variable(tf.zeros([3]))]
    variables[1].overwrite_with_gradient = True
    loss_scaler, counts = static(2.0), [tf.Variable([9.0, 9.0]) for _ in range(2)]
    optimizer = keras.optimizers.SGD(1.0)

    def step():
        with recording_scaler_calls([loss_scaler], nonzero=counts) as calls:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.zeros([2])))
            grads = [scaled * tf.ones([2]), tf.ones([3])]
            unscaled = loss_scaler.unscale(grads, variables)
            loss_scaler.apply(optimizer, unscaled, variables, unscaled=True)
        assert [one is None for one in calls.applied[0]] == [False, True]
        return unscaled

    np.testing.assert_array_equal(step()[1], [1.0] * 3)
    assert [one.numpy().tolist() for one in counts] == [[0.0, 0.0]] * 2


def test_lint_counts_no_new_value_among_the_gradients(monkeypatch):
    counted = []
    exponents = scaler.observe.exponents
    monkeypatch.setattr(scaler.observe, "exponents", lambda grads: counted.append(len(grads)) or exponents(grads))
    assert "of the sample's gradients" in lost_share(quantized(), keras.losses.MeanSquaredError(), data()).lower()
    assert counted == [2]
