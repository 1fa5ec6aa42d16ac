"""Guards that an optimizer's count of steps is read once for all variables, and that nobody can tell."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored

import scaler
from scaler.backend import apply_steps

LOSS_SCALER = scaler.LossScaler(scaler.NoScaling())
SHAPES = [(2, 3), (3,), (300, 300), (5, 5, 2)]
ADAPTIVE = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


def gradients(step):
    rng = np.random.default_rng(step)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES]


def gated(optimizer, grads, variables):
    LOSS_SCALER.apply(optimizer, grads, variables)


def by_itself(optimizer, grads, variables):
    optimizer.apply(grads, variables)


def trained(make_optimizer, update, steps=4, shapes=SHAPES):
    variables = [keras.Variable(np.full(shape, 2.0, np.float32)) for shape in shapes]
    optimizer = make_optimizer()
    optimizer.build(variables)
    step = tf.function(lambda *grads: update(optimizer, list(grads), variables), autograph=False)
    for number in range(steps):
        step(*gradients(number)[: len(shapes)])
    counts = [int(optimizer.iterations), int(optimizer._iterations)]
    return counts, [np.asarray(variable) for variable in [*variables, *optimizer.variables]]


@functools.cache
def alone(name):
    """What the optimizer of a name comes to without ours."""
    return trained(ADAPTIVE[name], by_itself)


@pytest.mark.slow_with("Adafactor", "accumulating")
@pytest.mark.parametrize("name", [name for name in ADAPTIVE if name != "Adam"])
def test_an_optimizer_moves_as_by_itself(name):
    counts, found = trained(ADAPTIVE[name], gated)
    counts_alone, expected = alone(name)
    assert counts == counts_alone
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-6, atol=1e-7)


def reads_of_the_count(optimizer, update):
    """How often a function reads the optimizer's count of steps."""
    graph = tf.function(update).get_concrete_function().graph
    handle = optimizer.iterations.value.handle
    inner = next(inner for outer, inner in graph.captures if outer is handle)
    return sum(op.type == "ReadVariableOp" for op in inner.consumers())


def reads_in_branches(graph, handle):
    """How often branches, which are given the handle, read it."""
    inner = next(inner for outer, inner in graph.captures if outer is handle)
    found = 0
    for op in inner.consumers():
        if op.type in ("If", "StatelessIf"):
            place = [each is inner for each in op.inputs].index(True) - 1
            branch = graph._get_function(op.get_attr("then_branch").name).graph
            found += sum(each.type == "ReadVariableOp" for each in branch.inputs[place].consumers())
        else:
            found += op.type == "ReadVariableOp"
    return found


@pytest.mark.parametrize("reading", [apply_steps.read_once, apply_steps.read_once_a_device])
def test_it_is_read_once(reading):
    variables = [keras.Variable([1.0]) for _ in range(5)]
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    def update():
        with reading(optimizer):
            for variable in variables:
                optimizer.update_step(tf.ones([1]), variable, tf.constant(0.1))

    assert reads_of_the_count(optimizer, update) == 1
    assert isinstance(optimizer._iterations, keras.Variable)
    assert "update_step" not in vars(optimizer)


def test_an_update_that_fails_leaves_the_count_where_it_was():
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable([1.0])])

    @tf.function
    def update():
        with apply_steps.read_once(optimizer), apply_steps.read_once_a_device(optimizer):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        update()
    assert isinstance(optimizer._iterations, keras.Variable)
    assert "update_step" not in vars(optimizer)


class Counting(keras.optimizers.Adam):
    """One of a user's own, which may do with the count what it likes."""

    def update_step(self, gradient, variable, learning_rate):
        assert isinstance(self._iterations, keras.Variable)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.slow
def test_optimizers_of_others_are_left_alone():
    _, found = trained(lambda: Counting(0.01), gated, shapes=SHAPES[:1])
    _, expected = alone("Adam")
    for own, other in zip(found[:1], expected[:1], strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-6, atol=1e-7)


@pytest.mark.slow
def test_without_iterations_it_is_read_for_each_variable(monkeypatch):
    monkeypatch.setattr(apply_steps, "_can_be_read_once", lambda optimizer: False)
    _, found = trained(ADAPTIVE["Adam"], gated, shapes=SHAPES[:2])
    monkeypatch.undo()
    _, expected = trained(ADAPTIVE["Adam"], gated, shapes=SHAPES[:2])
    for own, other in zip(found, expected, strict=True):
        assert own.tobytes() == other.tobytes()


def test_replicas_read_it_once_each():
    def reads_of_each(shapes, steps):
        strategy = mirrored(2)
        with strategy.scope():
            variables = [keras.Variable(np.full(shape, 2.0, np.float32)) for shape in shapes]
            optimizer, loss_scaler = keras.optimizers.Adam(0.01), scaler.LossScaler(scaler.NoScaling())
            optimizer.build(variables)

        def update(*grads):
            loss_scaler.apply(optimizer, [grad / 2 for grad in grads], variables)

        step = tf.function(lambda *grads: strategy.run(update, args=grads), autograph=False)
        for number in range(steps):
            step(*gradients(number)[: len(shapes)])
        _, expected = alone("Adam")
        for variable, other in zip(variables if steps else (), expected, strict=False):
            for part in strategy.experimental_local_results(variable.value):
                np.testing.assert_allclose(part, other, rtol=2e-6, atol=1e-7)
        graph = step.get_concrete_function(*gradients(0)[: len(shapes)]).graph
        counts = strategy.experimental_local_results(optimizer.iterations.value)
        return [reads_in_branches(graph, count.handle) for count in counts]

    assert reads_of_each(SHAPES[:2], steps=4) == reads_of_each(SHAPES[:1], steps=0)
