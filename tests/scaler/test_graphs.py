"""What AutoGraph rewrites: users' functions, also where the package calls them, and nothing of the package."""

import ast
import dataclasses
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scaler_cases import by_hand, gradients_of, plain_descent

import scaler


@tf.autograph.experimental.do_not_convert
def rewritten():
    """The names of the callers that AutoGraph has rewritten."""
    return {frame.name for frame in traceback.extract_stack() if "__autograph_generated" in frame.filename}


@dataclasses.dataclass(frozen=True)
class Written:
    """A strategy in plain Python, which only AutoGraph makes a graph of."""

    def init(self):
        return scaler.strategies.StaticState(tf.constant(4.0))

    def update(self, state, event):
        return scaler.strategies.StaticState(state.loss_scale * 2.0 if event.finite else state.loss_scale / 2.0)


def test_a_strategy_and_an_optimizer_may_be_plain_python():
    variable = tf.Variable([1.0])

    def optimizer(grads, variables):
        if grads[0][0] > 1.0:
            variables[0].assign([10.0])
        else:
            variables[0].assign([20.0])

    loss_scaler = by_hand(Written())
    step = tf.function(lambda grad: loss_scaler.apply(optimizer, [grad], [variable]).finite)
    step(np.float32([100.0]))
    assert (variable.numpy()[0], loss_scaler.loss_scale.numpy()) == (10.0, 8.0)
    step(np.float32([1.0]))
    assert (variable.numpy()[0], loss_scaler.loss_scale.numpy()) == (20.0, 16.0)
    step(np.float32([np.nan]))
    assert (variable.numpy()[0], loss_scaler.loss_scale.numpy()) == (20.0, 8.0)


def test_the_package_is_traced_as_it_is_written():
    variable, names = tf.Variable([1.0]), set()

    def optimizer(grads, variables):
        names.update(rewritten())

    loss_scaler = scaler.LossScaler(scaler.Static(4.0))

    @tf.function
    def step(x):
        before = scaler.snapshot([variable])
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(x * variable), [variable])
        return loss_scaler.apply(optimizer, grads, [variable], rollback=before).finite

    step(np.float32([1.0]))
    assert names == {"tf__step", "tf__optimizer"}


def test_the_optimizer_is_traced_as_it_is_written():
    variable, names = tf.Variable([1.0]), set()

    class Own(keras.optimizers.SGD):
        def update_step(self, *args):
            names.update(rewritten())
            super().update_step(*args)

    optimizer = scaler.LossScaleOptimizer(Own(0.5, gradient_accumulation_steps=2), scaler.Dynamic(4.0))
    other = scaler.LossScaleOptimizer(Own(0.5), scaler.Dynamic(4.0))

    def traced(optimizer, take):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(tf.reduce_sum(variable))
            take(tape.gradient(scaled, [variable]))

        return step

    step = traced(optimizer, lambda grads: optimizer.apply(grads, [variable]))
    traced(other, lambda grads: other.apply_gradients(zip(grads, [variable], strict=True))).get_concrete_function()
    step()
    step()
    np.testing.assert_array_equal(variable, [0.5])
    assert names == {"tf__step", "<lambda>"}


def test_autograph_can_rewrite_what_it_reaches():
    """It warns of every function with an assignment expression, also of one that a mark around it was forgotten for."""
    files = sorted(Path(scaler.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = [
        f"{file}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.NamedExpr)
    ]
    assert not found


def test_a_step_that_makes_slots_and_masters_is_traced_once():
    variable, traced, made = tf.Variable(tf.ones([2], tf.float16)), [], {}
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(4.0)), keras.optimizers.Adam(0.5)

    @tf.function
    def step(x):
        traced.append(x)
        if not made:
            made["masters"] = scaler.MasterWeights([variable])
        return loss_scaler.apply(optimizer, [x], made["masters"], unscaled=True).finite

    for _ in range(2):
        assert step(np.float16([1.0, 2.0]))
    assert len(traced) == 1
    np.testing.assert_allclose(variable, [0.0, 0.0], atol=1e-4)


def test_a_step_that_was_traced_by_itself_runs_in_a_loop_of_another_function():
    weight, loss_scaler = tf.Variable([1.0]), by_hand(scaler.Dynamic(4.0))
    step = tf.function(lambda: loss_scaler.apply(plain_descent, [tf.constant([4.0])], [weight]).finite)
    step.get_concrete_function()
    tf.function(
        lambda: tf.while_loop(lambda taken: taken < 2, lambda taken: (taken + tf.cast(step(), tf.int32),), (0,))
    )()
    np.testing.assert_array_equal(weight, [-1.0])
