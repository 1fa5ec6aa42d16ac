"""Guards what `TrainStep` accepts: models not built yet, inputs by name, every signature once, and bad arguments."""

import warnings

import keras
import layerwise_cases
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, static
from models import one_layer, squared_error
from rigs import Rig

import loops
import scaler


def test_a_model_is_built_inside_of_the_compiled_step_which_is_traced_once_for_each_signature():
    """TensorFlow traces a function again that made a variable: the model's, its masters and slots are made outside."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1, use_bias=False)])
    traced = []

    def counting(y, prediction):
        traced.append(tuple(y.shape))
        return squared_error(y, prediction)

    loss_scaler = scaler.LossScaler(scaler.Dynamic(64.0, growth_interval=2))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    compiled = tf.function(loops.TrainStep(model, counting, optimizer, loss_scaler=loss_scaler, accumulate=2))
    assert not model.built
    assert [bool(compiled(batch(number))["applied"]) for number in range(4)] == [False, True, False, True]
    assert model.built
    assert traced == [(8, 1)]
    for number in range(16):
        compiled(batch(number, count=8 if number % 2 else 3, bad=np.inf if number % 5 == 4 else None))
    assert compiled.experimental_get_tracing_count() == 2
    assert traced == [(8, 1), (3, 1)]


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


@pytest.mark.slow
def test_a_checkpoint_of_the_step_holds_everything():
    step = loops.TrainStep(one_layer("float16"), squared_error, keras.optimizers.Adam(0.01), accumulate=2)
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


@pytest.mark.slow
def test_each_group_finds_its_scale_and_every_layer_trains():
    """In float16 no gradient reaches the first of the two tanh layers by itself."""
    deep = layerwise_cases.chain([2.0**-13] * 2, width=4, head="float32")
    model, layerwise = scaler.layerwise.insert_rescales(deep, ["steep_0", "steep_1"])
    # The momentum is the sum of all gradients, whose smallest move no float32 weight.
    optimizer = keras.optimizers.SGD(2.0**-10, momentum=0.5)
    step = loops.TrainStep(model, squared_error, optimizer, layerwise=layerwise)
    before = [value.numpy() for value in step.masters.weights]
    run = tf.function(step)
    for seed in range(12):
        outputs = run(batch(seed))
    assert outputs["applied"]
    scales = dict(zip(step.layerwise.names, np.log2(step.layerwise.scales.numpy()), strict=True))
    assert scales["steep_1"] > scales["outputs"]
    assert scales["steep_0"] > scales["steep_1"]
    slots = [variable for variable in step.optimizer.variables if "momentum" in variable.path]
    assert len(slots) == len(before) == 6
    assert all(np.any(slot.numpy()) for slot in slots)


def narrow():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([4], dtype="bfloat16"), keras.layers.Dense(64, dtype="bfloat16")])


MODES = {
    "Kahan": scaler.weights.KahanWeights,
    "stochastic": lambda variables: scaler.weights.StochasticRounding(variables, seed=3),
}


@pytest.mark.slow_with("Kahan", "stochastic")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_used_and_tells_what_it_swallowed(mode):
    optimizer, other = (keras.optimizers.SGD(2.0**-9) for _ in range(2))
    step, model = loops.TrainStep(narrow(), squared_error, other, masters=MODES[mode]), narrow()
    weights, loss_scaler = MODES[mode](model.trainable_variables), scaler.LossScaler(scaler.NoScaling())

    def by_hand(x, y):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(squared_error(y, model(x, training=True)))
        loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), weights)
        return weights.swallowed

    compiled, shares = (lambda call: call) if mode == "Kahan" else tf.function, []
    run, by_hand = compiled(step), compiled(by_hand)
    for seed in range(4):
        outputs = run(batch(seed))
        shares.append(float(outputs["swallowed"]))
        assert shares[-1] == float(by_hand(*batch(seed)))
    assert 0.1 < np.mean(shares) < 1.0
    for one, other in zip(step.model.trainable_variables, model.trainable_variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert isinstance(step.masters, scaler.MasterWeights)


def test_masters_swallow_nothing_to_tell():
    step = loops.TrainStep(narrow(), squared_error, keras.optimizers.SGD(2.0**-9))
    assert "swallowed" not in step(batch())
    assert type(step.masters) is scaler.MasterWeights
