"""Guards a `TrainStep` with layer-wise scales, and one whose 16-bit weights have no masters; both on replicas, too."""

import keras
import layerwise_cases
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from models import squared_error

import loops
import scaler


def deep():
    """In float16 no gradient reaches the first of its two tanh layers by itself."""
    return layerwise_cases.chain([2.0**-13] * 2, width=4, head="float32")


def batch(seed=0, size=8):
    x, y = cases.batch(seed, size)
    return tf.constant(x), tf.constant(y)


def layered(**arguments):
    model, layerwise = scaler.layerwise.insert_rescales(deep(), ["steep_0", "steep_1"])
    # The momentum is the sum of all gradients, whose smallest move no float32 weight.
    optimizer = keras.optimizers.SGD(2.0**-10, momentum=0.5)
    return loops.TrainStep(model, squared_error, optimizer, layerwise=layerwise, **arguments)


def exponents(step):
    return np.log2(step.layerwise.scales.numpy()).astype(int).tolist()


@pytest.mark.slow_with("{}")
@pytest.mark.exhaustive_with("{'accumulate': 2}", "{'jit_compile': True}")
@pytest.mark.parametrize("arguments", [{}, {"jit_compile": True}, {"accumulate": 2}], ids=str)
def test_each_group_finds_its_scale_and_every_layer_trains(arguments):
    step = layered(**arguments)
    before = [value.numpy() for value in step.masters.weights]
    run = tf.function(step)
    for seed in range(12):
        outputs = run(batch(seed))
    assert outputs["applied"]
    scales = dict(zip(step.layerwise.names, exponents(step), strict=True))
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


def rounding(make, **arguments):
    optimizer = keras.optimizers.SGD(2.0**-9)
    return loops.TrainStep(narrow(), squared_error, optimizer, masters=make, **arguments)


@pytest.mark.slow_with("Kahan", "stochastic")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_used_and_tells_what_it_swallowed(mode):
    step, outside = rounding(MODES[mode]), MODES[mode]
    model = narrow()
    weights, loss_scaler = outside(model.trainable_variables), scaler.LossScaler(scaler.NoScaling())
    optimizer = keras.optimizers.SGD(2.0**-9)

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
