"""An optimizer that makes a NaN on replicas moves no bit on any of them, also if it does so on a single one."""

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import scaler

GOOD, BAD = np.ones((3, 2), np.float32), np.float32([[0, 0], [1, 0], [1, 0]])


def made(strategy, make, dtype="float32"):
    """A weight, what trains it, and a function that takes one step with a gradient on every replica."""
    with strategy.scope():
        weight = keras.Variable(np.ones((3, 2)), dtype=dtype, name="weight")
        optimizer, loss_scaler = make(), scaler.LossScaler(scaler.Dynamic(8.0))
        masters = scaler.MasterWeights([weight])
        if hasattr(optimizer, "build"):
            optimizer.build(masters.weights)
    count = strategy.num_replicas_in_sync

    @tf.function
    def step(grad):
        return strategy.run(
            lambda: loss_scaler.apply(optimizer, [grad * loss_scaler.loss_scale / count], masters).cause
        )

    def cause(grad):
        (value, *others) = {int(one) for one in strategy.experimental_local_results(step(tf.constant(grad)))}
        assert not others
        return scaler.Cause(value)

    return cause, [weight, *masters.weights, *getattr(optimizer, "variables", ())], loss_scaler


@pytest.mark.slow
def test_every_replica_is_put_back():
    cause, variables, loss_scaler = made(cases.mirrored(2), lambda: keras.optimizers.Adafactor(0.01), "float16")
    before = cases.raw(variables)
    assert cause(BAD) is scaler.Cause.UPDATE
    assert cases.raw(variables) == before
    assert "Adafactor turned finite gradients into a NaN" in loss_scaler.explain()
    assert cause(GOOD) is scaler.Cause.NONE
    assert cases.agree(variables)
    assert cases.finite(variables)
    assert cases.raw(variables) != before


def test_one_replica_is_enough():
    """A function may do something else on each."""
    guilty = tf.Variable(0)

    def move(grads, variables):
        context = tf.distribute.get_replica_context()
        own = tf.equal(context.replica_id_in_sync_group, guilty)
        bad = tf.logical_and(own, tf.reduce_all(tf.equal(grads[0], BAD)))
        variables[0].assign_sub(tf.where(bad, np.float32(np.nan), grads[0]))

    cause, variables, _ = made(cases.mirrored(2), lambda: move)
    before = cases.raw(variables)
    for replica in (0, 1):
        guilty.assign(replica)
        assert cause(BAD) is scaler.Cause.UPDATE
        assert cases.raw(variables) == before
    assert cause(GOOD) is scaler.Cause.NONE
    assert cases.agree(variables)


def test_a_learning_rate_that_is_no_number():
    strategy, optimizers = cases.mirrored(2), []

    def make():
        optimizers.append(keras.optimizers.Adam(0.1))
        return optimizers[0]

    cause, variables, loss_scaler = made(strategy, make)
    assert cause(GOOD) is scaler.Cause.NONE
    optimizers[0].learning_rate = np.nan
    before = cases.raw(variables)
    assert cause(GOOD) is scaler.Cause.UPDATE
    assert cases.raw(variables) == before
    assert "learning rate of Adam" in loss_scaler.explain()


def test_state_that_became_infinite_is_put_back_on_its_own_replica():
    """One look at all of BatchNorm's statistics tells that there is one; the others keep what the step made of them."""
    strategy = cases.mirrored(2)
    with strategy.scope():
        weight, optimizer = tf.Variable([1.0]), keras.optimizers.SGD(1.0)
        state = [
            tf.Variable(
                tf.zeros(shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )
            for shape in ([2], [3], [])
        ]
        loss_scaler = scaler.LossScaler(scaler.NoScaling())

    @tf.function
    def step():
        def own():
            before = scaler.snapshot(state)
            second = tf.distribute.get_replica_context().replica_id_in_sync_group == 1
            values = [[1.0, np.inf], [2.0, 2.0, 2.0], 3.0]
            for variable, value in zip(state, values, strict=True):
                variable.assign(tf.where(second, value, tf.ones_like(value)))
            return loss_scaler.apply(optimizer, [tf.constant([1.0])], [weight], rollback=before).finite

        return strategy.run(own)

    assert all(bool(each) for each in strategy.experimental_local_results(step()))
    found = [[part.tolist() for part in parts] for parts in cases.components(state)]
    assert found == [[[1.0, 1.0], [1.0, 0.0]], [[1.0] * 3, [2.0] * 3], [1.0, 3.0]]


def test_a_variable_more_costs_a_few_operations_on_each_replica():
    """On each nine for the update of itself and of its slot, and six for the sum of its gradient over both.

    A change that saves operations lowers this number.
    """

    def cost(count):
        strategy = cases.mirrored(2)
        with strategy.scope():
            variables, optimizer = [tf.Variable(tf.zeros([3, 5])) for _ in range(count)], keras.optimizers.SGD(0.1, 0.9)
            optimizer.build(variables)
            loss_scaler = scaler.LossScaler(scaler.NoScaling())

        @tf.function
        def step(grads):
            def own():
                return loss_scaler.apply(optimizer, list(map(tf.identity, grads)), variables).finite

            return strategy.run(own)

        graph = step.get_concrete_function([tf.TensorSpec([3, 5])] * count).graph
        (decision,) = (operation for operation in graph.get_operations() if operation.type == "If")
        branch = graph._get_function(decision.get_attr("then_branch").name).graph
        passing_on = ("Placeholder", "Const", "NoOp", "Identity", "EnsureShape")
        return sum(each.type not in passing_on for one in (graph, branch) for each in one.get_operations())

    assert cost(3) - cost(2) <= 2 * 9 + 6
