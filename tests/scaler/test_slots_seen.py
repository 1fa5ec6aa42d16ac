"""An optimizer's slots have the right values for every reader, thread and order of steps.

The updates of several small variables are compiled. An update that keeps slots elsewhere for speed has to pass this.
"""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import compile_updates

import scaler

COUNT, SHAPE = 6, (8, 8)
GRADS = [np.full(SHAPE, (i + 1) / COUNT, np.float32) for i in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def updates_made():
    """Compiles the updates of six small variables, as by default those of a hundred; counts them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield compile_updates(monkeypatch, 4)


class Run:
    """Six small variables, trained by one optimizer through each of its interfaces."""

    def __init__(self, wrapped=False):
        self.weights = [keras.Variable(np.full(SHAPE, i * 0.01, np.float32)) for i in range(COUNT)]
        self.inner = keras.optimizers.SGD(0.1, momentum=0.9)
        self.loss_scaler = scaler.LossScaler(scaler.Static(1.0))
        self.wrapper = scaler.LossScaleOptimizer(self.inner, scaler.Static(1.0)) if wrapped else None
        self.gated = tf.function(self.apply)
        self.plain = tf.function(lambda: self.inner.apply(GRADS, self.weights))
        self.seen = tf.function(lambda: tf.add_n([tf.reduce_sum(slot * 1.0) for slot in self.inner.momentums]))

    def apply(self):
        if self.wrapper is not None:
            return self.wrapper.apply([tf.constant(grad) for grad in GRADS], self.weights).finite
        return self.loss_scaler.apply(self.inner, [tf.constant(grad) for grad in GRADS], self.weights).finite

    def reset(self):
        """As if it had just been made."""
        for weight, value in zip(self.weights, expected(0)[0], strict=True):
            weight.assign(value)
        for variable in (self.inner.iterations, *self.inner.momentums):
            variable.assign(tf.zeros_like(variable))
        return self

    def values(self):
        return [weight.numpy() for weight in self.weights]


@pytest.fixture(scope="module")
def trained(updates_made):
    """A run after one step, which is traced once for all tests."""
    run = Run()
    run.gated()
    assert updates_made
    return run


@pytest.fixture
def run(trained):
    return trained.reset()


def expected(steps):
    """The weights after so many steps of momentum, and the sum of all momenta."""
    weight, momentum = [np.full(SHAPE, i * 0.01) for i in range(COUNT)], [np.zeros(SHAPE)] * COUNT
    for _ in range(steps):
        momentum = [0.9 * m - 0.1 * g for m, g in zip(momentum, GRADS, strict=True)]
        weight = [w + m for w, m in zip(weight, momentum, strict=True)]
    return weight, sum(m.sum() for m in momentum)


def assert_trained(run, steps):
    for weight, wanted in zip(run.values(), expected(steps)[0], strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


def test_a_reader_in_another_thread_loses_no_update(run):
    stop = threading.Event()
    run.gated()

    def read():
        while not stop.is_set():
            for slot in run.inner.variables[2:6]:
                slot.numpy()
            time.sleep(2e-4)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(99):
        run.gated()
    stop.set()
    thread.join()
    assert_trained(run, 100)


def test_a_reader_inside_of_the_step_loses_no_update(run):
    seen = []

    @tf.function
    def step():
        run.gated()
        tf.py_function(lambda: seen.append(run.inner.momentums[5].numpy().sum()), [], [])

    for _ in range(60):
        step()
    assert_trained(run, 60)
    assert len(seen) == 60


@pytest.mark.slow_with("False")
@pytest.mark.parametrize("wrapped", [False, True])
def test_functions_traced_before_and_after_the_first_step_agree(wrapped):
    run = Run(wrapped)
    (run.wrapper or run.inner).build(run.weights)
    assert float(run.seen()) == 0.0
    later = tf.function(run.seen.python_function)
    for steps in range(1, 6):
        run.gated()
        for look in (run.seen, later):
            np.testing.assert_allclose(look(), expected(steps)[1], rtol=1e-4)


@pytest.mark.parametrize("first", ["plain", "gated"])
def test_gated_and_plain_steps_in_turn(run, first):
    for number in range(6):
        step = run.plain if (number % 2 == 0) == (first == "plain") else run.gated
        step()
    assert_trained(run, 6)


def test_slots_assigned_between_steps_count(run):
    run.gated()
    assign = tf.function(lambda: [slot.assign(tf.zeros(SHAPE)) for slot in run.inner.momentums] and None)
    assign()
    for weight, value in zip(run.weights, expected(0)[0], strict=True):
        weight.assign(value)
    run.gated()
    assert_trained(run, 1)


@pytest.mark.slow
def test_saved_in_the_middle_and_restored(run, tmp_path):
    other = Run()
    for _ in range(3):
        run.gated()
    path = tf.train.Checkpoint(optimizer=run.inner, weights=run.weights).write(str(tmp_path / "middle"))
    other.gated()
    tf.train.Checkpoint(optimizer=other.inner, weights=other.weights).read(path).assert_consumed()
    for _ in range(2):
        other.gated()
    assert_trained(other, 5)
