"""Fault 8: the step raises in the middle, or Ctrl-C comes in the middle of a run.

Guards lines 1, 3 and 7 of the promise: counters, weights and what was written agree, and the run that goes on ends bit
for bit like one that was never broken off.
"""

import functools
import json
import pathlib
import signal
import tempfile
import threading

import fault_cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import assert_finite, raw

import loops
import scaler

IN_GRAPH = {"steps_per_call": 4, "jit_compile": False}


def build_model():
    """A float16 layer, moving statistics and a seed generator."""
    keras.utils.clear_session()  # The same names each time, by which a skip is kept.
    keras.utils.set_random_seed(7)
    norm = keras.layers.BatchNormalization(momentum=0.5, dtype="float16")
    dropout = keras.layers.Dropout(0.25, seed=3, dtype="float16")
    dense = keras.layers.Dense(1, dtype="float16")
    return keras.Sequential([keras.Input([4], dtype="float16"), norm, dropout, dense])


class Run:
    """A loop over twelve batches, of which number 2 overflows; `at` is called by the dataset when it gives number 5."""

    def __init__(self, folder, *, loss_fn=fault_cases.loss_fn, at=None, actions=(), **arguments):
        self.model = build_model()
        self.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
        self.step = loops.TrainStep(self.model, loss_fn, self.optimizer, loss_scaler=self.loss_scaler)
        self.path = folder / f"{len(list(folder.iterdir()))}.jsonl"
        data = [fault_cases.batch(n, factor=np.inf if n == 2 else 1.0) for n in range(12)]
        numbers = tf.data.Dataset.range(12)
        if at is not None:

            def call(number):
                return tf.ensure_shape(tf.py_function(lambda n: at(int(n)) or n, [number], number.dtype), [])

            numbers = numbers.map(call)
        parts = [tf.stack(part) for part in zip(*data, strict=True)]
        dataset = numbers.map(lambda n: tuple(part[n] for part in parts))
        writer = loops.JsonLines(self.path)
        self.loop = loops.Loop(self.step, dataset, actions=[writer, *actions], **arguments)

    def bits(self):
        weights = self.step.masters.weights
        variables = [*self.model.variables, *weights, *self.optimizer.variables, *self.loss_scaler.variables]
        assert_finite(variables)
        return raw(variables)

    def assert_consistent(self, reported=True):
        counters, scaled = self.loop.counters, self.loss_scaler.counters
        assert (counters.attempted, counters.applied) == (int(scaled.attempted), int(scaled.applied))
        assert int(self.optimizer.iterations) == counters.applied
        lines = [json.loads(line)["step"] for line in self.path.read_text().splitlines()]
        if reported:
            assert lines == list(range(1, counters.data + 1))
        # Steps of a call that broke off are counted but not reported.
        assert lines == sorted(set(lines))


@functools.cache
def whole():
    """The bits at the end of a run in the graph that nothing broke off."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(pathlib.Path(folder), **IN_GRAPH)
        run.loop.run(12)
        run.assert_consistent()
        return run.bits()


def interrupt_once(when):
    done = []

    def act(number):
        if number == when and not done:
            done.append(number)
            signal.raise_signal(signal.SIGINT)

    return act


@pytest.mark.slow
def test_ctrl_c_while_the_data_is_read(tmp_path):
    run = Run(tmp_path, at=interrupt_once(5), **IN_GRAPH)
    with pytest.raises(KeyboardInterrupt):
        run.loop.run(12)
    assert 0 < run.loop.counters.data <= 8  # The dataset reads ahead.
    run.assert_consistent()
    run.loop.run(12)
    assert run.bits() == whole()


@pytest.mark.slow
def test_ctrl_c_from_a_plain_thread_and_from_an_action(tmp_path):
    called, sent = threading.Event(), threading.Event()

    def wait_in_the_call(number):
        if number == 5:
            called.set()
            sent.wait(10)

    def send():
        called.wait(60)
        signal.raise_signal(signal.SIGINT)
        sent.set()

    act = interrupt_once(12)
    run = Run(tmp_path, at=wait_in_the_call, actions=[lambda visit: act(visit.counters.data)], **IN_GRAPH)
    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.loop.run(12)
    thread.join()
    assert run.loop.counters.data < 12
    run.assert_consistent()
    with pytest.raises(KeyboardInterrupt):
        run.loop.run(12)
    assert run.loop.counters.data == 12
    run.assert_consistent()
    assert run.bits() == whole()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_an_error_while_the_data_is_read_leaves_finished_steps(tmp_path):
    def fail(number):
        if number == 5:
            raise OSError("disk gone")

    run = Run(tmp_path, at=fail, jit_compile=False)
    with pytest.raises(tf.errors.OpError, match="disk gone"):
        run.loop.run(12)
    assert run.loop.counters.data == 5
    run.assert_consistent(reported=False)
    run.bits()
    # An error ends what a dataset's iterator gives; the next element is there all the same.
    run.loop.run(9)
    assert run.loop.counters.data == 9
    run.assert_consistent(reported=False)


@pytest.mark.slow
def test_an_error_while_tracing_or_in_an_assertion_leaves_everything_usable(tmp_path):
    broken, limit = [True], tf.Variable(1e9)

    def checked(y, prediction, factor):
        if broken:
            raise RuntimeError("not yet")
        tf.debugging.assert_less(tf.reduce_max(y), limit, "target too large")
        return fault_cases.loss_fn(y, prediction, factor)

    run = Run(tmp_path, loss_fn=checked, **IN_GRAPH)
    weights = raw(run.model.variables)
    with pytest.raises(RuntimeError, match="not yet"):
        run.loop.run(2)
    assert raw(run.model.variables) == weights
    assert run.loop.counters == loops.Counters()
    broken.clear()
    run.loop.run(4)
    before = raw(run.step.masters.weights + run.optimizer.variables)
    limit.assign(-1e9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="target too large"):
        run.loop.run(8)
    assert run.loop.counters.data == 4
    assert raw(run.step.masters.weights + run.optimizer.variables) == before
    run.assert_consistent()
    limit.assign(1e9)
    run.loop.run(8)
    run.bits()
    run.assert_consistent()


def test_an_assertion_at_run_time_holds_a_window_back():
    """A window decides in a branch, outside of which the assertion is."""
    weight, limit = tf.Variable([1.0]), tf.Variable(1e9)
    optimizer, loss_scaler = keras.optimizers.SGD(0.1), scaler.LossScaler(scaler.Dynamic(8.0, growth_interval=1))

    @tf.function
    def step(x, last):
        scaled = loss_scaler.scale(x)
        with tf.device("CPU:0"):  # There it takes its time.
            late = 0.0 * tf.linalg.det(tf.eye(300))
        tf.debugging.assert_less(x + late, limit)
        return loss_scaler.apply(optimizer, [tf.reshape(scaled, [1])], [weight], when=last).finite

    assert step(tf.constant(1.0), tf.constant(True))
    before = raw([weight, *optimizer.variables])
    limit.assign(-1e9)
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant(1.0), tf.constant(True))
    assert raw([weight, *optimizer.variables]) == before
    assert [int(count) for count in loss_scaler.counters] == [1, 1, 0, 0]
    assert float(loss_scaler.loss_scale) == 16.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_optimizer_that_raises_before_assigning(mode):
    weight, loss_scaler = tf.Variable(tf.ones([2], tf.float16)), scaler.LossScaler(scaler.Dynamic())
    masters, broken = scaler.MasterWeights([weight]), [True]

    def optimizer(grads, variables):
        if broken:
            raise RuntimeError("no update today")
        variables[0].assign_sub(grads[0])

    def step(factor):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(weight, tf.float32)) * factor)
        return {"applied": loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), masters).finite}

    run = fault_cases.run_in(mode, step)
    before = raw([weight, *masters.weights])
    with pytest.raises(RuntimeError, match="no update today"):
        run([(np.float32(0.5),)])
    assert raw([weight, *masters.weights]) == before
    assert [int(count) for count in loss_scaler.counters] == [0, 0, 0, 0]
    broken.clear()
    assert run([(np.float32(0.5),)])[0]["applied"]
    np.testing.assert_array_equal(weight.numpy(), np.float16([0.5, 0.5]))
