"""A graph warns, once, of scaled gradients from a memory that is no variable, and not of what it cannot know."""

import warnings

import pytest
import tensorflow as tf
from scaler_cases import gradients_of
from step_programs import trace_no_branches

import scaler

ZERO = tf.constant(0, tf.int64)


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


class Step:
    """A step that passes its gradient through something, `keep(self, grad)`."""

    def __init__(self, keep, strategy=None):
        self.weight, self.loss_scaler = tf.Variable([1.0, 2.0]), scaler.LossScaler(strategy)
        self.queue = tf.queue.FIFOQueue(4, [tf.float32], [[2]])
        self.queue.enqueue(tf.zeros(2))
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(2))
        self.keep, self.arguments = keep, {}

    @tf.function
    def __call__(self):
        grad = tf.ensure_shape(
            self.keep(self, gradients_of(self.loss_scaler, lambda: tf.reduce_sum(self.weight**2), self.weight)), [2]
        )
        return self.loss_scaler.apply(scaler.move_nothing, [grad], [self.weight], **self.arguments).finite


def through_a_queue(step, grad):
    late = step.queue.dequeue()
    step.queue.enqueue(grad)
    return late


def through_a_table(step, grad):
    step.table.insert(ZERO, 0.5 * step.table.lookup(ZERO) + grad)
    return step.table.lookup(ZERO)


def through_python(step, grad):
    return tf.py_function(lambda value: value, [grad], tf.float32)


def unscaled_in_a_queue(step, grad):
    return through_a_queue(step, step.loss_scaler.unscale([grad])[0])


def looked_up_in_the_forward_pass(step, grad):
    return gradients_of(step.loss_scaler, lambda: tf.reduce_sum(step.weight * step.table.lookup(ZERO)), step.weight)


@pytest.mark.parametrize("keep", [through_a_queue, through_a_table])
def test_a_memory_that_is_no_variable(keep):
    step = Step(keep)
    with pytest.warns(scaler.ScaleWarning, match=f"comes out of {keep.__name__[8:].replace('_', ' ')}") as said:
        assert step()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("keep", "strategy", "arguments"),
    [
        (through_python, None, {}),
        (looked_up_in_the_forward_pass, None, {}),
        (unscaled_in_a_queue, None, {"unscaled": True}),
        (through_a_queue, None, {"loss_scale": 1.0}),
        (through_a_queue, scaler.Static(1024.0), {}),
    ],
)
def test_what_is_no_mistake_or_cannot_be_known(keep, strategy, arguments):
    step = Step(keep, strategy)
    step.arguments = arguments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step()
