"""Every kind of optimizer is given gradients that are summed once, and leaves the same weights on all replicas.

Keras has no public way to be given reduced gradients: the scaler shadows a private method, whose name is pinned here.
"""

import contextlib

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from keras_two import MAKERS

import scaler


def moved_by(apply, optimizer=None, traced=tf.function, **arguments):
    """Where SGD with a learning rate of 1 takes a zero when each of 2 replicas has a gradient of 1."""
    strategy = cases.mirrored(2)
    with strategy.scope():
        variable = tf.Variable(0.0)
        optimizer = optimizer or keras.optimizers.SGD(1.0, **arguments)
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.build([variable])
        loss_scaler = scaler.LossScaler(scaler.NoScaling())
    strategy.run(traced(lambda: apply(optimizer, variable, loss_scaler)))
    assert cases.agree([variable])
    return float(variable.numpy())


def by_scaler(optimizer, variable, loss_scaler):
    loss_scaler.apply(optimizer, [tf.constant(1.0)], [variable])


def test_the_shadow_keeps_keras_from_summing_again_and_is_gone_afterwards(monkeypatch):
    assert moved_by(lambda optimizer, variable, _: optimizer.apply([tf.constant(1.0)], [variable])) == -2.0
    with cases.mirrored(2).scope():
        optimizer = keras.optimizers.SGD(1.0)
    assert moved_by(by_scaler, optimizer) == -2.0
    assert "_all_reduce_sum_gradients" not in vars(optimizer)

    from scaler.gate import propose

    monkeypatch.setattr(propose, "_gradients_are_reduced", lambda optimizer: contextlib.nullcontext())
    assert moved_by(by_scaler) == -4.0


@pytest.mark.parametrize("arguments", [{}, {"use_ema": True}, {"weight_decay": 0.5}], ids=str)
def test_without_a_function_it_is_the_same(arguments):
    """The replicas then pass one and the same gradient, which is not one for each of them."""
    assert moved_by(by_scaler, traced=lambda step: step, **arguments) == -2.0


class Slotted:
    """A callable object without a `__dict__`."""

    __slots__ = ()

    def __call__(self, grads, variables):
        variables[0].assign_sub(grads[0])


class Applying:
    """Not a Keras optimizer, but with its method."""

    def apply(self, grads, variables):
        variables[0].assign_sub(grads[0])


@pytest.mark.slow_with("slots", "apply")
@pytest.mark.parametrize("optimizer", [Slotted(), Applying()], ids=["slots", "apply"])
def test_functions_and_foreign_objects(optimizer):
    assert moved_by(by_scaler, optimizer) == -2.0


@pytest.mark.exhaustive
def test_plain_functions_whatever_the_aggregation_of_the_variable():
    """The gradients are the same on every replica already: TensorFlow must not sum what the function subtracts."""

    def descend(grads, variables):
        for grad, variable in zip(grads, variables, strict=True):
            variable.assign_sub(grad)

    strategy, aggregations = cases.mirrored(2), ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
    with strategy.scope():
        variables = [tf.Variable(0.0, aggregation=getattr(tf.VariableAggregation, one)) for one in aggregations]
        loss_scaler = scaler.LossScaler(scaler.NoScaling())
    strategy.run(tf.function(lambda: loss_scaler.apply(descend, [tf.constant(1.0)] * 4, variables).index))
    for aggregation, variable in zip(aggregations, variables, strict=True):
        found = [float(part) for part in strategy.experimental_local_results(variable)]
        assert found == [-2.0, -2.0], aggregation


@pytest.mark.slow_with("Momentum")
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_an_optimizer_of_keras_2_does_not_sum_again(make):
    strategy = cases.mirrored(2)
    with strategy.scope():
        weight, optimizer = tf.Variable([1.0, 1.0]), make()
        loss_scaler = scaler.LossScaler(scaler.NoScaling())

    @tf.function
    def step(grad):
        return strategy.run(lambda: loss_scaler.apply(optimizer, [tf.identity(grad)], [weight]).finite)

    for value, finite in ((0.5, True), (np.inf, False)):
        found = step(tf.constant([value, -0.5]))
        assert all(bool(each) is finite for each in strategy.experimental_local_results(found))
        for part in strategy.experimental_local_results(weight):
            assert part.numpy().tolist() == [0.5, 1.5]
    assert int(optimizer.iterations.numpy()) == 1


def test_no_gradient_on_any_replica_for_one_variable():
    strategy = cases.mirrored(2)
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
        optimizer = keras.optimizers.Adam(0.5, weight_decay=0.1)
        loss_scaler = scaler.LossScaler(scaler.NoScaling())
    step = tf.function(lambda: loss_scaler.apply(optimizer, [None, tf.constant(1.0)], variables).index)
    with pytest.warns(scaler.ScaleWarning, match="no gradient for 'Variable'"):
        strategy.run(step)
    strategy.run(step)
    assert variables[0].numpy().tolist() == [1.0, 2.0]
    assert float(variables[1].numpy()) < 3.0
    assert cases.agree(variables)
