"""Small variables are updated joined on every replica, with the bits of the optimizer's own update."""

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import scaler
from scaler.backend.devices import has_gpu
from scaler.gate import choose

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "EMA": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.5),
}
SHAPES = [(2, 3)] * 3 + [(4,)] * 2 + [()]
STEPS, BAD = 4, 2


def train(make, dtype="float32", **arguments):
    """The bits of every variable on each replica at the end of each step. In one step replica 1 overflows."""
    strategy, rng = cases.mirrored(2), np.random.default_rng(0)
    with strategy.scope():
        model = [keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"w{i}") for i, shape in enumerate(SHAPES)]
        masters, optimizer = scaler.MasterWeights(model), make()
        if optimizer.weight_decay:
            optimizer.exclude_from_weight_decay(var_list=model[:3])
        loss_scaler = scaler.LossScaler(scaler.Static(8.0))
    assert loss_scaler.loss_scale == 8.0  # The gradients are scaled by hand.

    @tf.function
    def step(number):
        def own():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            spoiled = tf.where((number == BAD) & (replica == 1), np.inf, 1.0)
            seeds = [tf.stack([10 * number + replica, place]) for place in range(len(model))]
            grads = [tf.random.stateless_normal(each.shape, seed) for each, seed in zip(model, seeds, strict=True)]
            grads = [tf.cast(grad * spoiled, dtype) for grad in grads]
            return loss_scaler.apply(optimizer, grads, masters, **arguments).finite

        return strategy.run(own)

    seen = []
    for number in range(STEPS):
        finite = strategy.experimental_local_results(step(tf.constant(number)))
        assert {bool(each) for each in finite} == {number != BAD}
        everything = [*model, *masters.weights, *optimizer.variables]
        assert cases.agree(everything)
        seen.append(cases.raw(everything))
    return seen


@pytest.mark.dear("traces the optimizer's own update and the joined one, on two devices")
@pytest.mark.exhaustive_with("EMA-float32-clipping2", "Adam-float32-clipping1")
@pytest.mark.slow_with("Adam-float32-clipping1", "EMA-float32-clipping2")
@pytest.mark.parametrize(
    ("name", "dtype", "clipping"),
    [("SGD", "float16", {"clip_norm": 0.5}), ("Adam", "float32", {}), ("EMA", "float32", {"clip_norm": 0.5})],
)
def test_joined_variables_get_the_bits_of_the_optimizers_own_update(name, dtype, clipping, chunks, monkeypatch):
    ours = train(OPTIMIZERS[name], dtype, **clipping)
    assert not all(chunk.decaying for chunk in chunks[0])
    monkeypatch.setattr(choose, "joined_on_replicas", lambda *arguments: None)
    assert ours == train(OPTIMIZERS[name], dtype, **clipping)
    assert ours[BAD - 1] == ours[BAD] != ours[BAD + 1]


def test_variables_with_a_limit_of_their_own_are_not_joined(chunks):
    assert train(OPTIMIZERS["SGD"], clip=scaler.ClipByNorm(0.5))
    assert not chunks


def test_a_step_of_keras_that_is_not_called_is_refused(monkeypatch, chunks):
    monkeypatch.setattr(keras.optimizers.SGD, "_backend_update_step", lambda *arguments: None)
    with pytest.raises(scaler.UnsupportedVersion, match="Nothing was changed"):
        train(OPTIMIZERS["SGD"])


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


@pytest.mark.skipif(has_gpu(), reason="other variables are joined for a GPU")
def test_a_variable_more_costs_a_few_operations_on_each_replica():
    """A read and an assignment of itself and of its slot on each, and six for the sum of its gradient over both.

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

    assert (cost(8) - cost(4)) / 4 <= 2 * 4 + 6


def test_a_variable_that_its_gradient_overwrites_gets_the_value_itself(chunks):
    """Such as the scales of float8 layers."""
    strategy = cases.mirrored(2)
    with strategy.scope():
        weights = [keras.Variable(tf.ones([3]), name=f"w{place}") for place in range(3)]
        weights[2].overwrite_with_gradient = True
        optimizer, loss_scaler = keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(8.0))

    @tf.function
    def step():
        def own():
            loss_scaler.scale(tf.constant(1.0))
            grads = [tf.fill([3], 8.0 / 2)] * 2 + [tf.fill([3], 7.0)]
            return loss_scaler.apply(optimizer, grads, weights).finite

        return strategy.run(own)

    step()
    parts = [[part.numpy().tolist() for part in weight.value.values] for weight in weights]
    assert parts == [[[0.0] * 3] * 2] * 2 + [[[7.0] * 3] * 2]
