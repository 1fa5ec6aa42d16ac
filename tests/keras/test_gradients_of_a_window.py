"""Guards that `gradient_accumulation_steps` drops the gradient of no variable that a later micro-batch has none for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler


@pytest.fixture
def two():
    """Two variables, their optimizer, and a function that takes a micro-batch of those named."""
    variables = {name: keras.Variable(np.zeros(2, np.float32), name=name) for name in "ab"}
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(8.0))
    optimizer.build(list(variables.values()))

    def micro_batch(names):
        weights = [variable.value for variable in variables.values()]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name].value) for name in names])
            scaled = optimizer.scale_loss(loss)
        return optimizer.apply(tape.gradient(scaled, weights), list(variables.values())).finite

    return variables, optimizer, micro_batch


def values(variables):
    return [variable.numpy().tolist() for variable in variables.values()]


@pytest.mark.slow_with("xla-names0-variable 'a' has no gradient in this micro-batch, and had one in an earlier one")
@pytest.mark.exhaustive_with(
    "graph-names0-variable 'a' has no gradient in this micro-batch, and had one in an earlier one",
    "graph-names2-variable 'b' has no gradient in this micro-batch, and had one in an earlier one",
    "loop-names0-variable 'a' has no gradient in this micro-batch, and had one in an earlier one",
    "loop-names2-variable 'b' has no gradient in this micro-batch, and had one in an earlier one",
    "xla-names1-variable 'b' has a gradient in this micro-batch, and had none in an earlier one",
    "xla-names2-variable 'b' has no gradient in this micro-batch, and had one in an earlier one",
)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "b"), "variable 'a' has no gradient in this micro-batch, and had one in an earlier one"),
        (("a", "ab"), "variable 'b' has a gradient in this micro-batch, and had none in an earlier one"),
        (("ab", "a"), "variable 'b' has no gradient in this micro-batch, and had one in an earlier one"),
    ],
)
def test_no_gradient_of_a_window_is_dropped(execute, two, names, said):
    variables, _, micro_batch = two
    run = execute(micro_batch)
    run(names[0])
    with pytest.raises(scaler.InvalidArgument, match=said):
        run(names[1])
    assert values(variables) == [[0.0, 0.0], [0.0, 0.0]]
    assert run(names[0])
    assert values(variables) == [[-1.0, -1.0] if name in names[0] else [0.0, 0.0] for name in "ab"]


def test_a_part_of_the_variables_may_be_applied_and_not_another_part_in_its_window(two):
    variables, optimizer, _ = two
    grad = tf.constant([8.0, 8.0])
    with tf.GradientTape():
        optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply([grad], [variables["a"]])
    with pytest.raises(scaler.InvalidArgument, match="variable 'a' has no gradient in this micro-batch"):
        optimizer.apply([grad], [variables["b"]])
    optimizer.apply([grad], [variables["a"]])
    assert values(variables) == [[-1.0, -1.0], [0.0, 0.0]]


ALL = ["first", "middle", "last"]


@pytest.mark.parametrize("bad_at", [0, 1])
@pytest.mark.parametrize("guilty", [["last"], ["middle"], ["middle", "last"], ALL], ids="-".join)
def test_a_spoiled_window_names_what_was_not_finite(execute, guilty, bad_at):
    variables = [tf.Variable(1.0, name=name) for name in ALL]
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Dynamic(8.0))
    optimizer.build(variables)

    def micro_batch(factors):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.stack(variables) * factors))
        outcome = optimizer.apply(tape.gradient(scaled, variables), variables)
        return outcome.finite, outcome.variable

    run = execute(micro_batch)
    bad = np.float32([np.inf if name in guilty else 1.0 for name in ALL])
    outcomes = [run(bad if number == bad_at else np.ones(3, np.float32)) for number in range(2)]
    assert not outcomes[-1][0]
    said = optimizer.loss_scaler.explain()
    assert f"the gradient of '{guilty[0]}" in said
    assert ("and the only one" in said) == (len(guilty) == 1)
    assert (f"the first of {len(guilty)} that are non-finite" in said) == (len(guilty) > 1)
    assert all(run(np.ones(3, np.float32)) is not None for _ in range(2))
    assert all(np.isfinite(variable.numpy()) for variable in [*variables, *inner.variables])
    assert variables[0].numpy() < 1.0
