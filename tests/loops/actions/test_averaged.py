"""Guards averaged weights: float32, of the masters, not moved by a skip, saved, evaluated with no variable moved."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, line, static
from models import plain_model, squared_error, stateful_model
from rigs import raw

import loops
import scaler

MOMENTUM = 0.75


def make(kind="float16", model=None, **arguments):
    model = model or stateful_model(kind)
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=MOMENTUM, **arguments)
    return loops.TrainStep(model, squared_error, optimizer, loss_scaler=static(8.0))


def held(step):
    masters = step.masters.weights if step.masters else []
    return [*step.model.variables, *masters, *step.optimizer.variables]


@pytest.mark.slow_with("bfloat16")
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_it_is_the_average_of_the_float32_weights_over_applied_steps(kind):
    """The reference averages in float64 what the steps leave; the first applied one, the third, starts it.

    Weights in float64 are averaged as they are.
    """
    step = make(kind, plain_model(kind))
    averaged, expected = loops.Averaged(step.model, step.optimizer), None
    for number in range(7):
        applied = bool(step(batch(number, bad=np.inf if number in (0, 1, 4) else None))["applied"])
        weights = step.masters.weights if step.masters else step.model.trainable_variables
        now = [tf.convert_to_tensor(weight).numpy().astype(np.float64) for weight in weights]
        if applied and expected is None:
            expected = now
        elif applied:
            expected = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(expected, now, strict=True)]
        for ours, theirs in zip(averaged.weights(), now if expected is None else expected, strict=True):
            assert ours.dtype == kind
            rtol = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-15}[kind]
            np.testing.assert_allclose(ours.numpy().astype(np.float64), theirs, rtol=rtol, atol=min(1e-6, rtol / 10))
    averages = step.optimizer._model_variables_moving_average
    assert {average.dtype for average in averages} == {"float64" if kind == "float64" else "float32"}
    for average, theirs in zip(averages, expected, strict=True):
        rtol = 1e-15 if kind == "float64" else 1e-5
        np.testing.assert_allclose(tf.convert_to_tensor(average), theirs, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_each_weight_has_its_own_average_whatever_the_order_that_the_optimizer_was_given(kind):
    layers = [keras.layers.Dense(4, name=name, dtype=kind, bias_initializer=name) for name in ("zeros", "ones")]
    model = keras.Sequential([keras.Input([4], dtype=kind), *layers])
    first, second = model.layers
    turned = [*second.trainable_variables, *first.trainable_variables]
    targets = scaler.MasterWeights(turned) if kind == "float16" else turned
    optimizer, loss_scaler = keras.optimizers.SGD(0.0, use_ema=True), static(8.0)
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(tf.cast(tf.reduce_sum(model(tf.ones([2, 4]))), tf.float32))
    assert loss_scaler.apply(optimizer, tape.gradient(scaled, turned), targets).finite
    averaged = loops.Averaged(model, optimizer)
    for average, variable in zip(averaged.weights(), model.trainable_variables, strict=True):
        np.testing.assert_array_equal(average, variable)
    with averaged.swapped():
        assert second.bias.numpy().tolist() == [1.0] * 4


@pytest.mark.slow
def test_layers_of_any_name_in_a_graph():
    """Keras opens a scope named as the layer is, and at the root of a graph none may begin with an underscore."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="_last")])
    step = make(model=model)
    tf.function(step)(batch())
    averaged = loops.Averaged(model, step.optimizer)
    np.testing.assert_allclose(tf.function(averaged)(batch()[0]), averaged(batch()[0]), rtol=1e-5, atol=1e-6)


def trained(step, averaged):
    step(batch())


def assigned(step, averaged):
    step.model.set_weights([np.full(weight.shape, 7.0) for weight in step.model.get_weights()])


@pytest.mark.parametrize("change", [trained, assigned])
def test_what_is_trained_or_assigned_within_is_not_lost_in_silence(change):
    step = make("float32", line())
    step(batch())
    before, averaged = raw(step.model.trainable_variables), loops.Averaged(step.model, step.optimizer)
    lost = pytest.warns(UserWarning, match=r"\d of \d weights were trained or assigned within it.*is dropped")
    with lost, averaged.swapped():
        change(step, averaged)
    assert raw(step.model.trainable_variables) == before


def test_weights_come_back_after_an_error():
    step = make("float32", line())
    step(batch())
    before = raw(held(step))

    def fail():
        with loops.Averaged(step.model, step.optimizer).swapped():
            raise RuntimeError("in the export")

    with pytest.raises(RuntimeError, match="in the export"):
        fail()
    assert raw(held(step)) == before


def test_what_cannot_work_is_named():
    step = make("float32", line())
    averaged = loops.Averaged(step.model, step.optimizer)
    with pytest.raises(loops.LoopError, match="no average before the first step"):
        averaged(batch()[0])
    with pytest.raises(scaler.InvalidArgument, match="training=True"):
        averaged(batch()[0], training=True)
    with pytest.raises(scaler.InvalidArgument, match="use_ema=True"):
        loops.Averaged(step.model, keras.optimizers.Adam())
    with pytest.raises(scaler.InvalidArgument, match=r"expected a keras\.Model"):
        loops.Averaged("resnet", step.optimizer)
    step(batch())
    with pytest.raises(loops.LoopError, match="other shapes than the 4 of model"):
        loops.Averaged(plain_model(), step.optimizer)(batch()[0])
    with pytest.raises(loops.LoopError, match="trains another"):
        loops.Averaged(line(), step.optimizer)(batch()[0])
