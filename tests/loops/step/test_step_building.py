"""Guards what `TrainStep` accepts: models not built yet, inputs by name, every signature once, and bad arguments."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, static
from models import one_layer, plain_model, squared_error
from rigs import Rig

import loops
import scaler


def unbuilt():
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])


@pytest.mark.exhaustive_with("True-False", "False-True")
@pytest.mark.parametrize(("built", "jit_compile"), [(False, False), (False, True), (True, False)])
def test_a_model_is_built_inside_of_the_compiled_step_and_nothing_is_traced_twice(built, jit_compile):
    """TensorFlow traces a function again that made a variable: the model's, its masters and slots are made outside."""
    traced, model = [], unbuilt()
    if built:
        model.build([8, 4])

    def counting(y, prediction):
        traced.append(tuple(y.shape))
        return squared_error(y, prediction)

    step = loops.TrainStep(model, counting, keras.optimizers.SGD(0.01, momentum=0.9), accumulate=2)
    compiled = tf.function(step, jit_compile=jit_compile)
    assert model.built == built
    assert [bool(compiled(batch(number))["applied"]) for number in range(4)] == [False, True, False, True]
    assert model.built
    assert traced == [(8, 1)]


@pytest.mark.slow_with("float16")
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_inputs_by_name(kind):
    keras.utils.set_random_seed(7)
    inputs = {"a": keras.Input([4], name="a", dtype=kind), "b": keras.Input([4], name="b", dtype=kind)}
    hidden = keras.layers.Add(dtype=kind)([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, keras.layers.Dense(1, dtype=kind)(hidden))
    (x, y), (other, _) = batch(0), batch(1)
    x, other = (tf.cast(part, kind) for part in (x, other))
    optimizer = keras.optimizers.SGD(0.1)
    rig = Rig(model, optimizer, example=({"a": x, "b": other}, y), loss_scaler=static(8.0))
    losses = [outputs["loss"] for outputs in rig.run([({"a": x, "b": other}, y)] * 5)]
    assert np.all(np.diff(losses) < 0)


@pytest.mark.exhaustive_with("float16")
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_step_is_traced_once_for_each_signature(kind):
    traced = []

    def counting(y, prediction):
        traced.append(tuple(y.shape))
        return squared_error(y, prediction)

    loss_scaler = scaler.LossScaler(scaler.Dynamic(64.0, growth_interval=2))
    step = loops.TrainStep(one_layer(kind), counting, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler)
    compiled = tf.function(step)
    for number in range(20):
        compiled(batch(number, count=8 if number % 2 else 3, bad=np.inf if number % 5 == 4 else None))
    assert compiled.experimental_get_tracing_count() == 2
    assert traced == [(3, 1), (8, 1)]


@pytest.mark.slow
def test_a_checkpoint_of_the_step_holds_everything():
    step = loops.TrainStep(plain_model("float16"), squared_error, keras.optimizers.Adam(0.01), accumulate=2)
    step(batch())
    tracked = {id(variable) for variable in step.variables}
    own = [*step.masters.weights, *step.loss_scaler.variables, *step.window.variables]
    assert tracked.issuperset(id(variable) for variable in own)


@pytest.mark.parametrize("start", [(), (keras.Input([4]),)], ids=["built later", "built"])
@pytest.mark.parametrize(
    ("dtype", "moves", "said"), [("float16", True, 1), ("float16", False, 0), ("mixed_float16", True, 0)]
)
def test_statistics_of_16_bits_are_named(dtype, moves, said, start):
    layers = keras.layers.BatchNormalization(dtype=dtype, trainable=moves), keras.layers.Dense(1, dtype="mixed_float16")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", scaler.ScaleWarning)
        step = loops.TrainStep(keras.Sequential([*start, *layers]), squared_error, keras.optimizers.SGD(0.1))
        step(batch(0))
        step(batch(1))
    assert sum("Give the layer dtype='mixed_float16'" in str(one.message) for one in found) == said
