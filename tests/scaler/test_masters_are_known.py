"""What an optimizer knows of single variables, a float16 model's optimizer knows of their masters."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from ways import graph

import loops
import scaler


def make_model(dtype):
    layers = [keras.layers.Dense(4, dtype=dtype, name=name, bias_initializer="ones") for name in ("first", "second")]
    model = keras.Sequential([keras.Input([4]), *layers], name="model")
    random = np.random.default_rng(3)
    for layer in model.layers:
        layer.kernel.assign(random.normal(size=[4, 4]).astype(np.float16))
    return model


def with_loss_scaler(model, optimizer):
    masters = scaler.MasterWeights(model.trainable_variables)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    step = graph(lambda grads: loss_scaler.apply(optimizer, grads, masters).finite)
    return lambda: step([tf.ones(variable.shape) / 16.0 for variable in model.trainable_variables])


def with_train_step(model, optimizer):
    def loss(y, prediction):
        del y, prediction
        return tf.add_n([tf.reduce_sum(tf.cast(variable, tf.float32)) for variable in model.trainable_variables]) / 16.0

    step = loops.TrainStep(model, loss, optimizer, loss_scaler=scaler.LossScaler(scaler.Static(1.0)))
    return lambda: step((tf.zeros([2, 4]), tf.zeros([2, 4])))


def with_keras(model, optimizer):
    wrapped = scaler.LossScaleOptimizer(optimizer, scaler.Static(1.0))
    return lambda: wrapped.apply(
        [tf.ones(variable.shape) / 16.0 for variable in model.trainable_variables], model.trainable_variables
    )


def by_variable(model):
    return {"var_list": [model.layers[0].bias, model.layers[1].kernel]}


def by_value(model):
    return {"var_list": [model.layers[0].bias.value]}


def by_name(model):
    del model
    return {"var_names": ["^model/first", "bias"]}


def trained(dtype, way, make_optimizer, before_first=lambda optimizer, model: None, then=lambda optimizer, model: None):
    """The weights in float32 after two steps, `then` called between them, of a float32 or a float16 model."""
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    before_first(optimizer, model)
    step = way(model, optimizer)
    step()
    then(optimizer, model)
    step()
    assert int(optimizer.iterations) == 2
    return [np.asarray(variable, np.float32) for variable in model.trainable_variables]


def by_itself(dtype, way, make_optimizer, **when):
    """The same without a graph: what it is compared with needs no trace."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        return trained(dtype, way, make_optimizer, **when)
    finally:
        tf.config.run_functions_eagerly(before)


def assert_alike(way, make_optimizer, **when):
    plain, copied = by_itself("float32", way, make_optimizer, **when), trained("float16", way, make_optimizer, **when)
    for one, other in zip(plain, copied, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-3)
    return copied


@pytest.mark.parametrize(
    ("way", "how"), [(with_loss_scaler, by_variable), (with_keras, by_value), (with_keras, by_name)]
)
def test_what_is_excluded_from_weight_decay(way, how):
    def exclude(optimizer, model):
        optimizer.exclude_from_weight_decay(**how(model))

    def make(model):
        del model
        return keras.optimizers.SGD(0.1, weight_decay=0.9)

    weights = assert_alike(way, make, before_first=exclude)
    np.testing.assert_allclose(weights[1], 1.0 - 0.0125, atol=2e-3)  # Two steps, and no decay.
    if how is by_variable:
        decayed = by_itself("float16", way, make)
        assert np.abs(decayed[1] - weights[1]).min() > 0.1


@pytest.mark.parametrize(("built", "of_masters"), [(False, True), (True, False)])
def test_what_is_excluded_by_its_master_or_before_the_optimizer_is_built_by_hand(of_masters, built):
    variable = keras.Variable(np.ones(3, np.float16), dtype="float16")
    masters, loss_scaler = scaler.MasterWeights([variable]), scaler.LossScaler(scaler.Static(1.0))
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=masters.weights if of_masters else [variable])
    if built:
        optimizer.build(masters.weights)
    loss_scaler.apply(optimizer, [tf.zeros([3], tf.float16)], masters)
    assert np.asarray(masters.weights[0]).tolist() == [1.0] * 3


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("way", [with_loss_scaler, with_keras])
def test_exclusion_after_the_optimizer_was_built(way):
    def exclude(optimizer, model):
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].bias])

    weights = assert_alike(way, lambda model: keras.optimizers.SGD(0.1, weight_decay=0.9), then=exclude)
    np.testing.assert_allclose(weights[1], (1.0 - 0.09) - 0.0125, atol=2e-3)  # Decayed once, not twice.


class ByVariable(keras.optimizers.SGD):
    """A learning rate for each variable, kept as Keras's optimizers keep what they know of one."""

    def __init__(self, rates, **arguments):
        super().__init__(1.0, **arguments)
        self._rates = {self._var_key(variable): rate for variable, rate in rates}

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * self._rates.get(self._var_key(variable), 1.0))


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("way", [with_loss_scaler, with_keras])
def test_learning_rates_by_variable(way):
    weights = assert_alike(way, lambda model: ByVariable([(model.layers[1].bias, 8.0)]))
    np.testing.assert_allclose(weights[3], 0.0, atol=2e-3)
    np.testing.assert_allclose(weights[1], 1.0 - 0.125, atol=2e-3)


@pytest.mark.slow_with("with_train_step")
@pytest.mark.skipif(not hasattr(keras.optimizers, "Muon"), reason="This Keras has no Muon.")
@pytest.mark.parametrize("way", [with_train_step, with_keras])
def test_layers_that_muon_leaves_out(way):
    make = lambda layers: lambda model: keras.optimizers.Muon(0.05, exclude_layers=layers)  # noqa: E731
    excluded = assert_alike(way, make(["second"]))
    assert np.abs(excluded[2] - by_itself("float16", way, make([]))[2]).max() > 1e-2


def by_identity(model, variable):
    return any(variable is weight for weight in model.layers[0].weights)


def by_name_and_path(model, variable):
    del model
    return variable.name in ("bias", "kernel") and variable.path.startswith("model/first")


def of_each_variable(choose):
    """A MultiOptimizer by identity, or by path and name."""

    def make(model):
        slow, fast = keras.optimizers.SGD(0.5), keras.optimizers.SGD(4.0, weight_decay=0.1)
        fast.exclude_from_weight_decay(var_list=[model.layers[0].bias])
        return keras.optimizers.MultiOptimizer(lambda variable: fast if choose(model, variable) else slow)

    return make


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="This Keras has no MultiOptimizer.")
@pytest.mark.parametrize(("way", "choose"), [(with_train_step, by_identity), (with_keras, by_name_and_path)])
def test_an_optimizer_for_each_variable(way, choose):
    weights = assert_alike(way, of_each_variable(choose))
    np.testing.assert_allclose(weights[1], 1.0 - 2 * 4.0 / 16.0, atol=2e-3)
    np.testing.assert_allclose(weights[3], 1.0 - 2 * 0.5 / 16.0, atol=2e-3)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("way", [with_loss_scaler, with_keras])
def test_averages_are_of_masters(way):
    averages = []
    for dtype in ("float32", "float16"):
        kept = []

        def make(model, kept=kept):
            del model
            kept.append(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
            return kept[0]

        trained(dtype, way, make)
        averages.append([np.asarray(average) for average in kept[0]._model_variables_moving_average])
    for plain, copied in zip(*averages, strict=True):
        assert copied.dtype == np.float32
        np.testing.assert_allclose(plain, copied, rtol=2e-3, atol=1e-3)


def test_an_optimizer_of_masters_takes_neither_their_variables_nor_other_masters():
    model = make_model("float16")
    variables, optimizer = model.trainable_variables, keras.optimizers.SGD(0.1)
    loss_scaler, grads = scaler.LossScaler(scaler.Static(1.0)), [tf.ones(variable.shape) for variable in variables]
    loss_scaler.apply(optimizer, grads, scaler.MasterWeights(variables))
    with pytest.raises(scaler.InvalidArgument, match="was built for other variables"):
        loss_scaler.apply(optimizer, grads, scaler.MasterWeights(variables))
    with pytest.raises(scaler.InvalidArgument, match="was built for other variables"):
        loss_scaler.apply(optimizer, grads, variables, allow_16bit_updates=True)
    unwrapped = keras.optimizers.SGD(0.1)
    unwrapped.build(variables)
    with pytest.raises(scaler.InvalidArgument, match="was built for other variables"):
        loss_scaler.apply(unwrapped, grads, scaler.MasterWeights(variables))


def test_a_pattern_is_sought_in_the_path_wherever_a_step_is_compiled(chunks):
    """Keras asks of the TensorFlow variable, and not of its own, whose name is "kernel" in every layer."""
    layers = [keras.layers.Dense(4, name=name, bias_initializer="ones") for name in ("first", "second", "first_too")]
    model = keras.Sequential([keras.Input([4]), *layers])
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["first"])
    step = graph(
        loops.TrainStep(model, lambda y, prediction: 0.0 * tf.reduce_sum(tf.cast(prediction, tf.float32)), optimizer)
    )
    before = [np.asarray(variable, np.float32) for variable in model.trainable_variables]
    assert step((tf.ones([2, 4]), tf.ones([2, 4])))["applied"]
    assert any(chunks)
    for variable, was in zip(model.trainable_variables, before, strict=True):
        excluded = re.search("first", variable.value.name)
        np.testing.assert_allclose(np.asarray(variable, np.float32), was * (1.0 if excluded else 0.95), rtol=1e-3)
