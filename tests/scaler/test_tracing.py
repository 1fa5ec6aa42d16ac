"""Guards that a step is traced once: a scale that moves, a skip, a refresh or a new interval never trace it again."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import by_hand, modes, take

import scaler


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_a_hundred_steps_run_the_python_code_once(jit):
    variable = tf.Variable(tf.ones([3], tf.float16))
    masters = scaler.MasterWeights([variable])
    interval = tf.Variable(4)
    loss_scaler = by_hand(scaler.Dynamic(2.0**15, growth_interval=interval))
    optimizer = keras.optimizers.Adam()
    optimizer.build(masters.weights)
    traced = []

    @tf.function(jit_compile=jit)
    def step(grad):
        traced.append(grad)
        return loss_scaler.apply(optimizer, [grad], masters, clip_norm=1.0)

    scales = set()
    for number in range(100):
        grad = np.full(3, np.inf if number % 17 == 16 else 1.0, np.float16)
        scales.add(float(step(grad).loss_scale))
        if number == 50:
            interval.assign(2)
            variable.assign([3.0, 3.0, 3.0])
    assert len(traced) == 1
    assert step.experimental_get_tracing_count() == 1
    assert len(scales) > 10


def test_an_optimizer_not_yet_built_is_built_by_the_first_call_and_never_again():
    variable = tf.Variable([1.0])
    loss_scaler, optimizer = by_hand(scaler.Static(2.0)), keras.optimizers.Adam()
    step = tf.function(lambda grad: loss_scaler.apply(optimizer, [grad], [variable]).finite)
    step(np.float32([np.inf]))
    made, traced = optimizer.variables, step.experimental_get_tracing_count()
    for value in (1.0, np.inf, 1.0, 1.0):
        step(np.float32([value]))
    assert optimizer.iterations.numpy() == 3
    assert step.experimental_get_tracing_count() == traced
    assert all(now is before for now, before in zip(optimizer.variables, made, strict=True))


@pytest.mark.slow_with("xla")
@modes("eager", "xla")
def test_the_first_step_may_be_a_skipped_one(execute):
    variable = tf.Variable([1.0])
    loss_scaler, optimizer = by_hand(scaler.Static(2.0)), keras.optimizers.Adam()
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [variable]).finite)
    assert not step(np.float32([np.nan]))
    assert variable.numpy()[0] == 1.0
    assert optimizer.iterations.numpy() == 0
    assert step(np.float32([1.0]))
    assert optimizer.iterations.numpy() == 1


def test_a_hundred_steps_in_one_call():
    variable = tf.Variable([0.0])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0, growth_interval=10))

    def descent(grads, variables):
        variables[0].assign_sub(grads[0])

    @tf.function
    def run(steps):
        for _ in tf.range(steps):
            take(loss_scaler, descent, lambda: tf.reduce_sum(variable), [variable])

    run(100)
    assert variable.numpy()[0] == -100.0
    assert loss_scaler.loss_scale.numpy() == 2.0**11
    assert int(loss_scaler.counters.applied) == 100
