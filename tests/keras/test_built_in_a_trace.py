"""What is made in the first trace of a step has no values there: slots and masters begin with those of the weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from versions import needs_keras

import scaler

X, Y = np.ones((4, 5), "float32"), np.zeros((4, 3), "float32")


class CopiesWeights(keras.optimizers.SGD):
    """Begins with a copy of the weights, as ScheduleFreeAdamW does since Keras 3.15, and moves towards it."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.copies = self.add_optimizer_variables(variables, "copy")
            for copy, variable in zip(self.copies, variables, strict=True):
                copy.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        copy = self.copies[self._get_variable_index(variable)]
        variable.assign(0.5 * (variable + copy) - learning_rate * gradient)


def fitted(optimizer, *, built, protect=False, policy="float32", batch=X, **compiled):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(3, dtype=policy)])
    if built:
        model.build((None, 5))
    optimizer = scaler.LossScaleOptimizer(optimizer, scaler.Static(16.0))
    model.compile(optimizer, loss="mse", **{"jit_compile": False, **compiled})
    if protect:
        scaler.protect(model)
    model.fit(batch, Y, batch_size=2, epochs=2, verbose=0)
    return [variable.numpy().tolist() for variable in model.weights], optimizer


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "how"), [("float16", {}), ("float32", {"run_eagerly": True})])
def test_a_model_that_fit_builds_trains_as_one_that_was_built(policy, how):
    wanted, _ = fitted(CopiesWeights(0.1), built=True, policy=policy, **how)
    got, optimizer = fitted(CopiesWeights(0.1), built=False, policy=policy, **how)
    assert got == wanted
    assert int(optimizer.iterations) == 4
    assert bool(optimizer.masters) is (policy == "float16")


@pytest.mark.slow
def test_with_accumulated_gradients_and_a_bad_first_batch():
    optimizer = CopiesWeights(0.1, gradient_accumulation_steps=2)
    keras.utils.set_random_seed(0)  # As the model does.
    layer = keras.layers.Dense(3)
    layer.build((None, 5))
    before = [variable.numpy().tolist() for variable in layer.weights]
    got, wrapped = fitted(optimizer, built=False, batch=X * np.nan)
    assert got == before
    assert int(wrapped.iterations) == 0
    assert [copy.numpy().tolist() for copy in optimizer.copies] == before


def layer_made_in_a_step(optimizer, loss_scaler):
    layer = keras.layers.Dense(3)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_mean(layer(x) ** 2))
        weights = layer.trainable_variables
        return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights).finite

    return step, layer


@pytest.mark.slow
@needs_keras("ScheduleFreeAdamW")
def test_schedule_free_adam_begins_with_the_weights():
    ends = []
    for built in (False, True):
        keras.utils.set_random_seed(0)
        optimizer, loss_scaler = keras.optimizers.ScheduleFreeAdamW(0.01), scaler.LossScaler(scaler.Static(16.0))
        step, layer = layer_made_in_a_step(optimizer, loss_scaler)
        if built:
            layer.build(X.shape)
            optimizer.build(layer.trainable_variables)
        assert all(step(X) for _ in range(3))
        ends.append(raw(layer.weights))
    assert ends[0] == ends[1]


def test_a_step_by_hand_that_makes_its_layer():
    optimizer = CopiesWeights(0.1)
    step, layer = layer_made_in_a_step(optimizer, scaler.LossScaler(scaler.Static(16.0)))
    assert not step(X * np.inf)
    assert all(np.array_equal(copy, own) for copy, own in zip(optimizer.copies, layer.weights, strict=True))
    assert step(X)
    assert int(optimizer.iterations) == 1


def test_weights_that_a_step_makes_of_its_arguments_are_refused():
    made, loss_scaler, optimizer = [], scaler.LossScaler(scaler.Static(16.0)), CopiesWeights(0.1)

    @tf.function
    def step(x):
        if not made:
            made.append(tf.Variable(x, name="of_x"))
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(made[0]))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, made), made).finite

    with pytest.raises(scaler.InvalidArgument, match=r"'of_x:0' has no value before the step runs: .* model\.build"):
        step(tf.constant([1.0]))


@pytest.mark.slow
def test_an_optimizer_may_be_made_in_the_first_trace():
    weight, made = tf.Variable([1.0]), []

    @tf.function
    def step(x):
        if not made:
            made.append(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
        with tf.GradientTape() as tape:
            scaled = made[0].scale_loss(tf.reduce_sum(weight * x))
        return made[0].apply([tape.gradient(scaled, weight)], [weight]).finite

    assert [bool(step(tf.constant([value]))) for value in (1.0, 3e38, 1.0)] == [True, False, True]
    assert weight.numpy() == [0.0]
    assert int(made[0].iterations) == 2
    assert float(made[0].loss_scale) == 2.0**14
