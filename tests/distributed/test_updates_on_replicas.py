"""What a step moves on every replica: each its own copies, and each as little as it can."""

import keras
import numpy as np
import replica_cases as cases
import tensorflow as tf

import scaler


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

    assert (cost(8) - cost(4)) / 4 <= 2 * 9 + 6
