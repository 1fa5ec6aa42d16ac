"""Guards that a skipped step never happened: not for weights, slots and masters, nor for the model's other state."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, one_layer, stateful_model
from rigs import Written, raw
from scaler_cases import OPTIMIZERS, by_hand, descent, modes
from ways import graph

import scaler


class Run(Written):
    """A small float16 model with BatchNorm and dropout, its masters, its optimizer and its step."""

    def __init__(self, execute, optimizer="Adam", model=stateful_model):
        super().__init__(model("float16"), OPTIMIZERS[optimizer](), scaler.LossScaler(scaler.Dynamic(256.0)))
        if isinstance(self.optimizer, keras.optimizers.Optimizer):
            self.optimizer.build(self.masters.weights)
        self.step = execute(lambda x, y: self.take(x, y)[1].finite)

    def bits(self):
        return raw(self.moved())


def spoiled(x, kind):
    x = np.array(x)
    x[2, 1] = {"infinity": np.inf, "nan": np.nan, "overflow in the forward pass": 1e6}[kind]
    return x


@modes("graph")
def test_skipped_batches_leave_no_bit_changed_and_the_run_goes_on_as_without_them(execute):
    run = Run(execute)
    start = [variable.numpy() for variable in run.moved()]
    seeds = [variable.numpy() for variable in run.model.non_trainable_variables]
    without = []
    for number in range(2):
        assert run.step(*batch(number))
        without.append(run.bits())
    # Applied steps move statistics and seeds.
    moved = [np.any(old != new.numpy()) for old, new in zip(seeds, run.model.non_trainable_variables, strict=True)]
    assert all(moved)
    for variable, value in zip(run.moved(), start, strict=True):
        variable.assign(value)
    for number in range(2):
        x, y = batch(number)
        assert run.step(x, y)
        assert run.bits() == without[number]
        for kind in ("infinity", "nan", "overflow in the forward pass"):
            assert not run.step(spoiled(x, kind), y)
            assert run.bits() == without[number]
        assert not run.step(x, 1e10 * y)
        assert run.bits() == without[number]
    # Bad data costs no scale, an overflow of a finite loss an octave.
    assert run.loss_scaler.loss_scale.numpy() == 2.0**6
    assert any(b"generator" in v.path.encode() for v in run.model.non_trainable_variables)


def test_a_skipped_step_leaves_every_optimizer_alone():
    run = Run(graph, "SGD", one_layer)
    x, y = batch()
    assert run.step(x, y)
    before = run.bits()
    assert not run.step(spoiled(x, "infinity"), y)
    assert run.bits() == before
    assert run.step(x, y)
    assert run.bits() != before


def test_restoring_puts_back_every_bit_of_any_dtype(execute):
    values = [
        np.float32([np.nan, -0.0, np.inf]),
        np.float16([6e-8, -1]),
        np.int64([-5]),
        np.uint32([7]),
        np.array([True]),
    ]
    variables = [tf.Variable(value) for value in values]
    before = raw(variables)

    def run():
        kept = scaler.snapshot(variable for variable in variables)
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        kept.restore()
        return tf.constant(0)

    execute(run)()
    assert raw(variables) == before


@pytest.mark.slow_with("xla")
@modes("eager", "graph", "xla")
def test_an_applied_step_puts_back_only_what_is_no_longer_finite(execute):
    """And what its layer has beside it: a mean of 3e26 beside the variance of another batch would be worse."""
    with tf.name_scope("norm"):
        mean, variance = (tf.Variable([1.0, 2.0], trainable=False, name=name) for name in ("mean", "variance"))
    other = tf.Variable([1.0, 2.0], trainable=False, name="other/mean")
    # A statistic kept in float16 can overflow although the loss and the gradients are finite.
    statistic = tf.Variable(tf.constant([1.0, 2.0, np.nan], tf.float16), trainable=False)
    seed, weight = tf.Variable([5], trainable=False), tf.Variable([1.0])
    moved = [
        (mean, [3e26, 4.0]),
        (variance, [np.inf, 5.0]),
        (other, [6.0, 7.0]),
        (statistic, [np.inf, 3.0, np.nan]),
        (seed, [6]),
    ]
    loss_scaler, optimizer = by_hand(scaler.Static(2.0)), descent(weight)

    def step(grad):
        before = scaler.snapshot([mean, variance, other, statistic, seed])
        for variable, value in moved:
            variable.assign(tf.constant(value, variable.dtype))
        return loss_scaler.apply(optimizer, [grad], [weight], rollback=before).finite

    assert execute(step)(np.float32([2.0]))
    found = [variable.numpy().tolist() for variable in (mean, variance, other)]
    assert found == [[1.0, 4.0], [1.0, 5.0], [6.0, 7.0]]
    np.testing.assert_array_equal(statistic.numpy(), np.float16([1, 3, np.nan]))
    assert (seed.numpy()[0], weight.numpy()[0]) == (6, 0.0)
